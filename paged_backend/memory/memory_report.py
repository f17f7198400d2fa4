"""Where the memory of keys, values and recurrent states goes, in words."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.config import EngineConfig
from paged_backend.memory.kv_cache import LayerSpec
from paged_backend.stats import EngineStats, GroupStats, StateStats


def explain_memory(stats: EngineStats, layers: Sequence[LayerSpec], config: EngineConfig) -> str:
    """A few sentences for people: what a token costs, what is reserved, who holds it, and what is wasted."""
    lines = _explain_blocks(stats, layers, config) if layers else ["No layer keeps keys and values."]
    if stats.states is not None:
        lines += _explain_states(stats.states)
    if not stats.num_steps:
        lines.append("Nothing has run yet.")
    elif layers:
        lines.append(
            f"Over time {stats.waste:.1%} of what requests held was waste: slots at the end of their last blocks."
        )
    if stats.num_cached_tokens:
        lines.append(f"{stats.num_cached_tokens:,} prompt tokens were not computed, since their blocks were cached.")
    if stats.num_preemptions:
        lines.append(
            f"Memory ran out {stats.num_preemptions:,} times: a request was set aside, and "
            f"{stats.num_recomputed_tokens:,} tokens had to be computed again. More kv_cache_memory, or a lower "
            "max_num_seqs, avoids that."
        )
    return "\n".join(lines)


def _explain_blocks(stats: EngineStats, layers: Sequence[LayerSpec], config: EngineConfig) -> list[str]:
    per_token = sum(group.bytes_per_token for group in stats.groups)
    dtype = config.kv_dtype if config.kv_dtype != "auto" else str(layers[0].dtype).removeprefix("torch.")
    lines = [
        f"{len(layers)} attention layers keep keys and values in {dtype}: {_size(per_token)} a token.",
        f"{_size(stats.reserved_bytes)} are reserved; "
        f"at most {_size(stats.peak_allocated_bytes)} were held by requests at once.",
    ]
    for group in stats.groups:
        lines += _explain_group(group)
    return lines


def _explain_states(states: StateStats) -> list[str]:
    def size(slots: int) -> str:
        return _size(slots * states.bytes_per_slot)

    lines = [
        f"{states.num_layers} layers keep a state of everything before, {size(1)} a request however long it is, and as "
        "much again for what its next step writes.",
        f"  {size(states.num_reserved_slots)} are reserved for states, {size(states.num_held_slots)} are held now.",
        f"  {states.num_snapshots} prefixes keep their state for prompts that begin alike, of at most "
        f"{states.max_snapshots} ({size(states.max_snapshots)}, see snapshot_memory); {states.num_evictions} lost it.",
    ]
    if states.mode == "stepped":
        lines.append("  A prompt goes on from a state token by token, since the model cannot with many at once.")
    return lines


def _explain_group(group: GroupStats) -> list[str]:
    def size(slots: float) -> str:
        return _size(slots * group.bytes_per_token)

    rule = {"full": "see all earlier tokens"}.get(group.rule, f"see a {group.rule} of tokens, and give the rest back")
    return [
        f"{group.num_layers} layers {rule}: {group.num_blocks:,} blocks of {group.block_size} tokens, "
        f"{size(group.num_reserved_slots)}.",
        f"  Now {size(group.num_allocated_slots)} are held by requests ({size(group.num_filled_slots)} filled, "
        f"{size(group.num_wasted_slots)} wasted), {size(group.num_cached_slots)} are cached for reuse, "
        f"{size(group.num_free_blocks * group.block_size)} are free.",
        f"  Over time {size(group.mean_allocated_slots)} were held on average, "
        f"{size(group.peak_allocated_slots)} at most.",
    ]


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} GiB"
