"""Ray Data itself, where it is installed: a pool of actors answers a dataset, bad rows and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray.data", reason="Ray Data is not installed (extra ray)")
# Processes of Ray's own start, load everything anew and end.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def test_a_pool_of_engines_answers_every_row_of_a_dataset(folder: str, predictor: Any, tmp_path: Path) -> None:
    import ray

    from paged_backend.integrations.ray import PagedPredictor

    rows: list[dict[str, Any]] = [
        {"id": index, "prompt": f"row {index}", "params": {"max_tokens": 1 + index % 4}} for index in range(14)
    ]
    rows.append({"id": 14, "prompt": "", "params": {"max_tokens": 3}})
    rows.append({"id": 15, "prompt": "the last", "params": {"max_tokens": 4}})
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    try:
        ray.data.DataContext.get_current().enable_progress_bars = False
        answers = ray.data.from_items(rows, override_num_blocks=4).map_batches(
            PagedPredictor,
            fn_constructor_kwargs={
                "model": folder,
                "params": {"max_tokens": 4, "ignore_eos": True},
                "params_column": "params",
            },
            compute=ray.data.ActorPoolStrategy(size=2),
            num_cpus=1,
            batch_size=4,
        )
        # Files of different blocks have to fit together.
        answers.write_parquet(str(tmp_path / "answers"))
        found = {row["id"]: row for row in ray.data.read_parquet(str(tmp_path / "answers")).take_all()}
    finally:
        ray.shutdown()
    assert sorted(found) == list(range(16))
    assert [found[index]["num_output_tokens"] for index in range(16)] == [*[1, 2, 3, 4] * 3, 1, 2, 0, 4]
    assert found[14]["error"].startswith("RequestRefused: the prompt is empty")
    alone = predictor({"prompt": [rows[3]["prompt"]], "params": [{"max_tokens": 4}]})
    assert list(found[3]["token_ids"]) == alone["token_ids"][0]
