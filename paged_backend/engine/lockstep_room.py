"""LockstepRoom: whether all members of a lockstep can run at the same time, as they have to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from paged_backend.engine.served_model import ServedModel
from paged_backend.errors import RequestRefused
from paged_backend.memory.block_manager import BlockManager
from paged_backend.request.request import Request


def check_room(request: Request, served: ServedModel) -> None:
    """Raise RequestRefused if ``request`` and the unfinished others of its lockstep could never run at once.

    They would wait for each other for ever. Only what is certain is refused: blocks of equal beginnings count once, and
    none is to spare.
    """
    if request.lockstep is None:
        return
    members = [member for member in request.lockstep.members if not member.is_finished]
    members += [request, *request.forks]
    what = f"with this request {len(members)} members of one lockstep would have to run at once"
    if len(members) > served.num_seats:
        raise RequestRefused(f"{what}, and {served.seat_limit}; raise it")
    shortage = _shortage(members, served)
    if shortage is not None:
        raise RequestRefused(f"{what}, and {shortage}; raise kv_cache_memory, or lower max_tokens")


def check_room_beside_pins(unfinished: Iterable[Request], served: ServedModel) -> None:
    """Raise RequestRefused if the members of a lockstep among ``unfinished`` could not run at once beside what is
    pinned."""
    locksteps = dict.fromkeys(request.lockstep for request in unfinished)
    for lockstep in locksteps:
        members = [] if lockstep is None else [member for member in lockstep.members if not member.is_finished]
        shortage = _shortage(members, served)
        if shortage is not None:
            raise RequestRefused(
                f"{len(members)} members of one lockstep could not run at once beside the pinned prefix: {shortage}; "
                "pin it when they are over, unpin another prefix or raise kv_cache_memory"
            )


def _shortage(members: Sequence[Request], served: ServedModel) -> str | None:
    """Why the blocks do not suffice for all of ``members`` at once, with the numbers; None when they do."""
    blocks = served.blocks
    if served.runs_at_once([member.max_num_tokens for member in members]):
        return None
    shared = _num_shared_blocks(members, blocks) if blocks.enable_prefix_caching else 0
    for group, pool in zip(blocks.groups, blocks.pools, strict=True):
        # The last token is never stored. A window cuts blocks at both ends at its worst only.
        each = (group.blocks_for(member.max_num_tokens - 1, blocks.block_size, 1) for member in members)
        need = sum(each) - shared - len(members) * (group.rule.kind != "full")
        room = pool.num_blocks - pool.num_pinned
        if need > room:
            return (
                f"their prompts and max_tokens need {need} blocks of {blocks.block_size} tokens in the {group.rule} "
                f"attention group, which has {room} that are not pinned"
            )
    return None


def _num_shared_blocks(members: Sequence[Request], blocks: BlockManager) -> int:
    """How many full blocks of the prompts have the same beginning as a pinned one or one of a member before."""
    seen: set[tuple[object, ...]] = set()
    for salt, tokens in blocks.pins:
        seen.update(_beginnings(salt, tokens, blocks.block_size))
    count = 0
    for member in members:
        prompt = member.token_ids[: member.num_prompt_tokens]
        for block in _beginnings(member.cache_salt, prompt, blocks.block_size):
            count += block in seen
            seen.add(block)
    return count


def _beginnings(salt: str | None, tokens: Sequence[int], block_size: int) -> Iterator[tuple[object, ...]]:
    """Something for each full block that is equal where all tokens up to its end are."""
    # Equal beginnings end in an equal number, which stands for them in the next block.
    beginning: object = salt
    for start in range(0, len(tokens) - block_size + 1, block_size):
        block = (beginning, *tokens[start : start + block_size])
        yield block
        beginning = hash(block)
