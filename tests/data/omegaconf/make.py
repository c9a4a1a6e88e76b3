"""Put a DictConfig of the installed omegaconf into the files of a checkpoint: see README.md."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import omegaconf
import run_configs
import torch
from omegaconf import OmegaConf


def configuration(model: dict[str, Any], mp: int) -> Any:
    plain = {name: value for name, value in model.items() if isinstance(value, str | int | float | bool | None)}
    # Version 2.0 has no keys but text.
    rows = {"a": "a"} if omegaconf.__version__.startswith("2.0") else {1: "a", 2: 2}
    cfg = OmegaConf.create(
        {
            "_name": None,
            "common": {"model_parallel_size": 2, "fp16": True, "seed": 1, "tags": ["a", "b"]},
            "model": {**plain, "distributed_rank": mp, "lr": [0.01, 0.001]},
            "criterion": {"_name": "cross_entropy", "model_parallel_size": 2, "distributed_world_size": 2},
            "dataset": {"num_shards": "${distributed_training.distributed_world_size}", "rows": rows},
            "stages": [{"model_parallel_size": 2, "use_sharded_state": True}, [{"distributed_world_size": 2}], 2],
            "absent": None,
        }
    )
    cfg.checkpoint = OmegaConf.structured(run_configs.CheckpointConfig)
    cfg.checkpoint.checkpoint_suffix = f"-model_part-{mp}-shard0"
    cfg.distributed_training = OmegaConf.structured(
        run_configs.DistributedConfig(ports=[2, 3]),
    )
    cfg.distributed_training.distributed_rank = mp
    if hasattr(omegaconf.base, "UnionNode"):
        cfg.union = OmegaConf.structured(run_configs.UnionConfig)
    OmegaConf.set_struct(cfg, True)
    OmegaConf.set_readonly(cfg.common, True)
    return cfg


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    target.mkdir()
    for path in sorted(source.glob("*-model_part-*.pt")):
        root = torch.load(path, weights_only=False)
        cfg = configuration(vars(root["cfg"]["model"]), mp=int(path.stem.partition("model_part-")[2][0]))
        kept = {key: root[key] for key in ("model", "shard_metadata", "extra_state", "optimizer_history")}
        torch.save({"cfg": cfg, **kept}, target / path.name)


if __name__ == "__main__":
    main()
