"""A scheduling policy of one's own, used by the process that defines it: who asks for less goes first."""

from __future__ import annotations

import argparse

from paged_backend import Engine, SamplingParams, sample_model
from paged_backend.policies import KeyedPolicy, RequestView


class ShortAnswersFirst(KeyedPolicy):
    """The request that may generate the fewest tokens goes first; of equals, the earlier arrival."""

    def key(self, request: RequestView) -> int:
        return request.params.max_tokens


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or hub id; by default a small model that is fetched once")
    name = parser.parse_args().model or sample_model.fetch()
    with Engine.from_pretrained(name, scheduler=ShortAnswersFirst, max_num_seqs=1, kv_cache_memory="64MiB") as engine:
        for count in (24, 4, 12):
            engine.add_request("Once upon a time", SamplingParams(max_tokens=count, ignore_eos=True))
        while engine.has_unfinished_requests():
            for output in engine.step():
                if output.finished:
                    print(f"{len(output.token_ids)} tokens: {output.text!r}")
