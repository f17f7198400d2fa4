"""LockstepRoom: whether all members of a lockstep can run at the same time, as they have to."""

from __future__ import annotations

from collections.abc import Sequence

from paged_backend.engine.served_model import ServedModel
from paged_backend.errors import RequestRefused
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
    if served.runs_at_once([member.max_num_tokens for member in members]):
        return
    block_size = served.blocks.block_size
    shared = _num_shared_blocks(members, block_size) if served.blocks.enable_prefix_caching else 0
    for group, pool in zip(served.blocks.groups, served.blocks.pools, strict=True):
        # The last token is never stored. A window cuts blocks at both ends at its worst only.
        each = (group.blocks_for(member.max_num_tokens - 1, block_size, 1) for member in members)
        need = sum(each) - shared - len(members) * (group.rule.kind != "full")
        room = pool.num_blocks - pool.num_pinned
        if need > room:
            raise RequestRefused(
                f"{what}, and their prompts and max_tokens need {need} blocks of {block_size} tokens in the "
                f"{group.rule} attention group, which has {room} that are not pinned; raise kv_cache_memory, or lower "
                "max_tokens"
            )


def _num_shared_blocks(members: Sequence[Request], block_size: int) -> int:
    """How many full blocks of the members' prompts have the same beginning as one of a member before."""
    seen: set[tuple[object, ...]] = set()
    count = 0
    for member in members:
        prompt = member.token_ids[: member.num_prompt_tokens]
        # Equal beginnings end in an equal number, which stands for them in the next block.
        beginning: object = member.cache_salt
        for start in range(0, len(prompt) - block_size + 1, block_size):
            block = (beginning, *prompt[start : start + block_size])
            count += block in seen
            seen.add(block)
            beginning = hash(block)
    return count
