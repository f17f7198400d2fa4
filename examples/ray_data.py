"""Answer a dataset with Ray Data on two engines; stopped, the same command goes on with the rows that are missing."""

from __future__ import annotations

import argparse
import collections
from pathlib import Path

import pyarrow
import pyarrow.parquet
import ray
from ray.data.checkpoint import CheckpointConfig

from paged_backend import sample_model
from paged_backend.integrations.ray import PagedPredictor

TOWNS = ["Aldbury", "Brill", "Cley", "Dent", "Eyam", "Frome", "Goring", "Hay", "Ilam", "Kersey"]
GOODS = ["wool", "salt", "cider", "slate", "baskets", "honey", "lace", "apples", "bells", "rope"]


def questions(count: int) -> list[dict[str, object]]:
    """Chats of very different lengths, as documents are."""
    rows: list[dict[str, object]] = []
    for number in range(count):
        town, goods = TOWNS[number % 10], GOODS[number // 10 % 10]
        document = f"{town} sells {goods}. " + "The market is held once a week. " * (number * 7 % 30)
        question = f"{document}\n\nIn one word, what does {town} sell?"
        rows.append({"id": number, "messages": [{"role": "user", "content": question}]})
    return rows


def main() -> None:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where questions, answers and the checkpoint are kept")
    parser.add_argument("--model", help="a folder or hub id; by default a small model that is fetched once")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=128)
    arguments = parser.parse_args()
    # Workers have folders of their own.
    folder = arguments.folder.absolute()
    asked, answered = folder / "questions", folder / "answers"
    folder.mkdir(parents=True, exist_ok=True)
    # Parquet, for the filter of Ray's checkpoint takes no JSON lines. A file is a block, the least that an engine gets.
    asked.mkdir(exist_ok=True)
    rows, num_files = questions(arguments.rows), 4 * arguments.engines
    for number in range(min(num_files, len(rows))):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[number::num_files]), asked / f"{number}.parquet")

    # Beside the engines: what leaves out answered rows, what reads and what writes.
    ray.init(num_cpus=arguments.engines + 3, include_dashboard=False, log_to_driver=False)
    ray.data.DataContext.get_current().checkpoint_config = CheckpointConfig(
        id_column="id", checkpoint_path=str(folder / "checkpoint"), delete_checkpoint_on_success=False
    )
    answers = ray.data.read_parquet(str(asked)).map_batches(
        PagedPredictor,
        fn_constructor_kwargs={
            "model": arguments.model or sample_model.fetch(),
            "params": {"max_tokens": arguments.max_tokens},
            "model_kwargs": {"dtype": "auto"},
            "kv_cache_memory": "512MiB",
        },
        compute=ray.data.ActorPoolStrategy(size=arguments.engines),
        num_cpus=1,
        batch_size=arguments.batch_size,
    )
    answers.write_parquet(str(answered))
    ray.data.DataContext.get_current().checkpoint_config = None
    found = ray.data.read_parquet(str(answered)).take_all()
    ray.shutdown()

    for row in sorted(found, key=lambda row: row["id"])[:5]:
        print(f"{row['id']}: {row['text']!r}{row['error']}")
    reasons = collections.Counter(row["finish_reason"] for row in found)
    print(f"{len(found)} rows answered, {len({row['id'] for row in found})} different ones: {dict(reasons)}")


if __name__ == "__main__":
    main()
