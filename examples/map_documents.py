"""Map one question over many documents: all of them share one running batch, and each answer comes when it is done."""

from __future__ import annotations

import argparse
import asyncio

from paged_backend import AsyncEngine, Engine, SamplingParams, sample_model

TOWNS = ["Aldbury", "Brill", "Cley", "Dent", "Eyam", "Frome", "Goring", "Hay", "Ilam", "Kersey"]
GOODS = ["wool", "salt", "cider", "slate", "baskets"]
# Texts of very different lengths, as documents are.
DOCUMENTS = [
    f"{town} is a town that sells {goods}. " + "The market is held once a week, and people come from far away. " * extra
    for extra, goods in enumerate(GOODS)
    for town in TOWNS
]
QUESTION = "{document}\n\nIn one word, what does the town sell? It sells"


async def answer(service: AsyncEngine, document: str, params: SamplingParams) -> str:
    """One document's answer; whoever awaits it does so beside all the others."""
    output = await service.submit(QUESTION.format(document=document), params)
    return output.text.strip()


async def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or hub id; by default a small model that is fetched once")
    parser.add_argument("--max-tokens", type=int, default=4)
    arguments = parser.parse_args()
    name = arguments.model or sample_model.fetch()
    params = SamplingParams(max_tokens=arguments.max_tokens, stop=[".", "\n"])

    with Engine.from_pretrained(name, model_kwargs={"dtype": "auto"}, kv_cache_memory="512MiB") as engine:
        async with AsyncEngine(engine) as service:
            answers = await asyncio.gather(*(answer(service, document, params) for document in DOCUMENTS))
        for document, text in zip(DOCUMENTS, answers, strict=True):
            print(f"{document.split('.')[0]}: {text!r}")
        stats = engine.stats()
        print(f"{len(answers)} documents in {stats.num_steps} steps, {stats.peak_running} at once")


if __name__ == "__main__":
    asyncio.run(main())
