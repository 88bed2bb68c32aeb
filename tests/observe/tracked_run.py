"""Logs a run and its resumed start to one tracker, and prints what the tracker's own reader finds.

It runs in the environment of `.ci/setup trackers`, without pytest: `python tracked_run.py wandb DIRECTORY`.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from isotrain.observe.loggers import open_loggers

METRIC = "val-core/gsm8k/reward/mean@4"
CONFIG = {"seed": 7, "model": {"path": "x"}, "rollout": {"stop": ["</s>"]}}


def tensorboard(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {"points": [(event.step, event.value) for event in events.Scalars(METRIC)]}


def wandb(directory: Path) -> Any:
    from swanlab.converter.wb.wbdatastore import WBDataStoreReader
    from wandb.proto import wandb_internal_pb2

    points, runs, config = {}, set(), {}
    for file in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        with WBDataStoreReader() as reader:
            reader.open(file)
            while (data := reader.scan()) is not None:
                record = wandb_internal_pb2.Record.FromString(data)
                if record.WhichOneof("record_type") == "run":
                    runs.add(record.run.run_id)
                    config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
                for item in record.history.item:
                    if METRIC in (item.key, *item.nested_key):
                        points[record.history.step.num] = json.loads(item.value_json)
    return {
        "points": sorted(points.items()),
        "runs": len(runs),
        "config": {key: config[key] for key in CONFIG},
    }


def swanlab(directory: Path) -> Any:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    points, runs = {}, set()
    for file in sorted(directory.glob("swanlab/run-*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "start":
                runs.add(record.start.id)
            if record.WhichOneof("record_type") == "scalar" and record.scalar.key == METRIC:
                points[record.scalar.step] = record.scalar.value.number
        reader.close()
    return {"points": sorted(points.items()), "runs": len(runs)}


def mlflow(directory: Path) -> Any:
    import mlflow

    set_by_user = mlflow.is_tracking_uri_set()
    client = mlflow.MlflowClient(None if set_by_user else f"sqlite:///{directory}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("project")
    assert experiment is not None
    found = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(found[0].info.run_id, METRIC.replace("@", "_at_"))
    return {
        "points": [(point.step, point.value) for point in history],
        "runs": len(found),
        "name": found[0].info.run_name,
        "status": found[0].info.status,
        "config": found[0].data.params,
    }


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "tensorboard": ("tensorboard", tensorboard),
    "wandb": ("wandb", wandb),
    "swanlab": ("swanlab", swanlab),
    "mlflow": ("mlflow-skinny", mlflow),
}


def main() -> None:
    kind, directory = sys.argv[1], Path(sys.argv[2])

    def fail(message: str) -> None:
        raise SystemExit(message)

    # The second start resumes from step 2, as after a kill: step 3 comes again.
    for first, last in ((1, 3), (3, 5)):
        (logger,) = open_loggers(
            [kind], run_directory=directory, project="project", name="name", config=CONFIG, warn=fail
        )
        for step in range(first, last + 1):
            logger.write(step, {METRIC: 0.25 * step, "train/loss": float("nan")})
        logger.close()
    package, read = READERS[kind]
    print(json.dumps({"version": version(package), "torch": "torch" in sys.modules, **read(directory)}))


if __name__ == "__main__":
    main()
