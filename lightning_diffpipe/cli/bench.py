"""`diffpipe bench`."""

from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from lightning_diffpipe.cli.training import run_training
from lightning_diffpipe.cli.values import verb
from lightning_diffpipe.errors import require_number

_STEPS = 30


@verb("measure some steps of a training beside their plan: diffpipe bench experiment=glyphs")
def bench(config: DictConfig) -> Any:
    """Trains as `train` would, but saves and logs nothing, and prints measured numbers beside planned ones."""
    from lightning_diffpipe.callbacks import PipelineMonitor
    from lightning_diffpipe.viewing.measured import number_table

    given = {override.partition("=")[0] for override in HydraConfig.get().overrides.task}
    OmegaConf.set_struct(config, False)
    if "trainer.max_steps" not in given:
        config.trainer.max_steps = _STEPS
    require_number("trainer.max_steps", config.trainer.max_steps, 5, whole=True)
    config.trainer.update(
        enable_checkpointing=False, enable_model_summary=False, limit_val_batches=0
    )
    config.update(logger={}, save_to=None, save_lora=None, save_lora_every_n_steps=None)
    monitor = {
        "_target_": "lightning_diffpipe.PipelineMonitor",
        "every_n_steps": config.trainer.max_steps,  # the first looks come by themselves
        "folder": str(Path(config.output_dir) / "pipeline"),
    }
    # Others count in the plan (averages, stored encodings).
    others = {
        name: node
        for name, node in (config.get("callbacks") or {}).items()
        if OmegaConf.is_dict(node) and not str(node.get("_target_")).endswith(".PipelineMonitor")
    }
    config.callbacks = {**others, "bench": monitor}
    trainer = run_training(config)
    (found,) = (each for each in trainer.callbacks if isinstance(each, PipelineMonitor))
    if trainer.is_global_zero:
        print(number_table(found.numbers))
        if Path(monitor["folder"]).exists():  # of a pipeline
            print(f"\n{monitor['folder']} has the plan, its timeline and a trace")
    return found.numbers
