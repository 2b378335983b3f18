"""Settings of a run: one frozen dataclass, its flags, and the only code of the trainer that reads them."""

import contextlib
import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, get_args

from models import MODEL_TYPES, DeepSeekV2Config, GLM4MoEConfig, Qwen3MoEConfig
from models.checkpoint import read_config
from models.checkpoint.folder import config_faults, config_file
from models.decoder import Remat
from topoep_jax import launch
from topoep_jax._integers import is_integer
from topoep_jax.cli.flags import Flags
from topoep_jax.knobs import KNOBS, Frozen, Knobs, change, check, fields_of, knob

REMATS = get_args(Remat)
FLOATS = ("bfloat16", "float32")
ModelConfig = Qwen3MoEConfig | GLM4MoEConfig | DeepSeekV2Config
MODELS: dict[str, Callable[[], ModelConfig]] = {
    "qwen3-tiny": Qwen3MoEConfig.tiny,
    "glm4-tiny": GLM4MoEConfig.tiny,
    "deepseek-v2-tiny": DeepSeekV2Config.tiny,
    "qwen3-30b-a3b": Qwen3MoEConfig.qwen3_30b_a3b,
    "glm-4.5-air": GLM4MoEConfig.glm_4_5_air,
    "deepseek-v2": DeepSeekV2Config.deepseek_v2,
    "qwen3-30b-a3b-paper": Qwen3MoEConfig.paper,
    "glm-4.5-air-paper": GLM4MoEConfig.paper,
    "deepseek-v2-paper": DeepSeekV2Config.paper,
}
_DEVICE_FLAG = "--xla_force_host_platform_device_count"


@dataclasses.dataclass(unsafe_hash=True, kw_only=True)
class TrainConfig(Frozen, Knobs):
    """Everything that decides a run. Each field with a `Knob` is a flag; `config.json` keeps them all.

    The knobs of the model's layers (`topoep_jax.knobs`) are settings, too; those with another default stand here again.
    """

    block_rows: int = change("block_rows", 32)
    overflow: Any = change(  # Not known before the devices are, and dropped rows would be another model.
        "overflow",
        None,
        choices=("loop", "flag"),
        unset="loop on CPU, flag elsewhere, where such a step changes nothing and runs again with loop",
    )

    data: tuple[str, ...] = knob(
        (),
        "globs of .txt and .jsonl files (field 'text'), or of .npy vectors of token ids; default: Python's own library",
    )
    steps: int = knob(150, "optimizer steps of the whole run", least=1)
    run_dir: str = knob("", "folder of the run; default: the next free runs/NNNN (the last one with --resume)")
    resume: bool = knob(False, "go on from the last checkpoint in --run_dir with its settings; flags given override")
    restore: int = knob(
        -1, "step of the checkpoint that --resume goes on from, where it is not the last; later ones are set aside"
    )
    save_every: int = knob(50, "steps between checkpoints; the last step is always saved", least=1)
    record_routing: int = knob(
        0,
        "record the experts of every n-th step's tokens in routing.npz, for `topoep trace`; 0: of none",
        least=0,
    )
    seed: int = knob(0, "seed of parameters and of the order of the data", least=0)

    model: str = knob(
        "qwen3-tiny",
        f"one of {', '.join(MODELS)}; a tiny one fits a laptop, 30B with AdamW takes 500 GB; default: that of"
        " --init_from, if there is one",
    )
    shape: str = knob(
        "", "changes to the model's shapes, as in num_layers=2,ffn=96; a name that is none tells which there are"
    )
    init_from: str = knob(
        "",
        "folder whose weights the run starts from, in Hugging Face's format or the trainer's own; default: random",
    )
    dtype: str = knob("bfloat16", "compute type", choices=FLOATS)
    param_dtype: str = knob(
        "",
        "of the parameters; bfloat16 has float32 masters in the optimizer; default: float32 on CPU, else bfloat16",
        choices=("", *FLOATS),
    )
    remat: str = knob(
        "none",
        "what each layer's backward pass makes again: none, full (all but its input), dots (all but products)",
        choices=REMATS,
    )
    balance_loss: bool = knob(
        False, "train with the auxiliary losses, and the rule of the selection bias, that the model was trained with"
    )

    batch_size: int = knob(8, "sequences per step over all ranks, a multiple of --ep x --dp x --microbatches", least=1)
    microbatches: int = knob(1, "parts of a batch that run one after the other; their gradients are added up", least=1)
    seq_len: int = knob(256, "tokens per sequence", least=1)
    lr: float = knob(1e-3, "peak learning rate")
    warmup: int = knob(20, "steps of linear warm-up; a cosine to a tenth of the peak follows", least=0)
    weight_decay: float = knob(0.1, "decoupled weight decay; norms are exempt")
    clip: float = knob(1.0, "largest global norm of the gradient")

    ep: int = knob(8, "expert-parallel ranks; devices are emulated on CPU when there are too few", least=1)
    dp: int = knob(1, "groups of --ep ranks, each with all experts and a share of the batch", least=1)
    fsdp: bool = knob(False, "divide dense parameters, too, among all ranks, which gather them where they are used")
    domains: int = knob(
        0,
        "equal scale-up domains to see the ranks as; 0: two halves on CPU, the mesh's own elsewhere",
        least=0,
    )
    xla_options: bool = knob(
        True, "on GPUs: compile for overlap and device-initiated exchanges, see topoep_jax.transport.xla_options"
    )
    safe_exchange: bool = knob(
        False, "with --xla_options: leave out what faults of XLA's exchange are known of, at a price in time"
    )
    check_steps: int | None = knob(
        None,
        "first steps of a run, and of one that goes on, whose exchanges are checked (--check_exchange checks all); the"
        " checked step is compiled beside the other",
        least=0,
        unset="2 on GPUs; 0 on CPU, where rows are copied",
    )
    check_every: int = knob(0, "then check every n-th step, too; 0: none", least=0)
    skew: float | None = knob(None, "force routing with this skew (0 uniform; < 0 fixed hot experts); unset: natural")

    coordinator: str = knob(
        "", "host:port of process 0, for runs of several processes; Slurm, Open MPI and Kubernetes say it by themselves"
    )
    num_processes: int = knob(
        1,
        "processes of the run; unset: as many as the launcher says, else 1; 1 runs alone whatever started it",
        least=1,
    )
    process_id: int = knob(0, "which of them this is; unset: the one that the launcher says")
    peer_timeout_s: float = knob(
        600.0, "seconds that processes wait for each other after compiling, and kernels of --transport=device in a step"
    )

    of_weights: ModelConfig | None = None
    """Shapes of the folder that the run started from, if they take the place of those of `model`, which then is the
    folder's name: later the folder may be gone."""
    of_data: str = ""
    """Digest of the tokens that the run trains on, from its start on."""

    def __post_init__(self) -> None:
        check(self, "--")
        if self.restore < -1 or (self.restore >= 0 and not self.resume):
            raise ValueError(f"--restore={self.restore} must be the step of a checkpoint, and belongs to --resume")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"--seed={self.seed} must be 0 to 2^31 - 1")
        for name in ("lr", "clip", "cap_factor"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"--{name}={getattr(self, name)} must be a finite positive number")
        if not 0 < self.peer_timeout_s <= 1e6:
            raise ValueError(f"--peer_timeout_s={self.peer_timeout_s} must be positive, and at most 1000000 seconds")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"--weight_decay={self.weight_decay} must not be negative")
        if self.of_weights is None and self.model not in MODELS:
            raise ValueError(f"--model={self.model} is unknown: take one of {', '.join(MODELS)}")
        for whole, parts in (
            ("batch_size", "ep dp microbatches"),
            ("ep dp", "num_processes"),
            ("ep", "domains"),
        ):
            if self._product(whole) % (self._product(parts) or 1):
                raise ValueError(
                    f"{self._named(whole)} is not a multiple of {self._named(parts)}:"
                    " every rank must get an equal share"
                )
        if not 0 <= self.process_id < self.num_processes:
            raise ValueError(
                f"--process_id={self.process_id} must be 0 to {self.num_processes - 1} with"
                f" --num_processes={self.num_processes}"
            )
        if self.num_processes > 1 and not (self.coordinator and self.run_dir):
            raise ValueError(
                f"--num_processes={self.num_processes} needs --coordinator=host:port and a --run_dir for all"
            )
        self.freeze()

    @property
    def num_devices(self) -> int:
        """Devices that the run takes."""
        return self.ep * self.dp

    @property
    def sizes(self) -> str:
        """The flags that `num_devices` comes from."""
        return self._named("ep dp")

    def _product(self, names: str) -> int:
        return math.prod(getattr(self, name) for name in names.split())

    def _named(self, names: str) -> str:
        """The flags with their values; those that are 1 only where no other is left."""
        telling = [name for name in names.split() if getattr(self, name) != 1] or names.split()[:1]
        return " x ".join(f"--{name}={getattr(self, name)}" for name in telling)

    def shapes(self) -> ModelConfig:
        """The model's shapes: those of the weights or of `model`, with the changes of `shape`.

        Raises:
          ValueError: a change that is not name=integer, or a name the model does not have.
        """
        base = self.of_weights or MODELS[self.model]()
        known = {field.name: field.type for field in dataclasses.fields(base)}
        changes: dict[str, Any] = {}
        for part in filter(None, self.shape.split(",")):
            name, _, value = part.partition("=")
            if known.get(name) is not int or not value.isdecimal():
                names = ", ".join(n for n, kind in known.items() if kind is int)
                raise ValueError(f"--shape has {part!r}: write name=integer with a name out of {names}")
            changes[name] = int(value)
        return dataclasses.replace(base, **changes)

    def save(self, path: pathlib.Path, history: Sequence[Any] = ()) -> None:
        """Writes the settings that a later `--resume` takes over, and the run's record, see `train.resume`."""
        of_weights = self.of_weights and self.of_weights.to_hf()
        content = {**dataclasses.asdict(self), "of_weights": of_weights}
        content["history"] = [dataclasses.asdict(start) for start in history]
        half = path.with_suffix(".half")  # A run that is stopped here still has its settings.
        half.write_text(json.dumps(content, indent=2) + "\n")
        half.replace(path)

    @staticmethod
    def kept(path: pathlib.Path) -> dict[str, Any]:
        """The settings that `save` wrote, but for those that belong to each start.

        Raises:
          ValueError: they are damaged, or of another version.
        """
        try:
            kept = _parse_kept(json.loads(path.read_text(encoding="utf-8-sig")))
            with contextlib.suppress(ValueError):  # A flag may mend what a setting lacks.
                TrainConfig(**kept)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{path} is damaged, or of another version, so the run cannot go on: {error}. Bring the file back, or"
                f" start another run from its parameters, with --init_from={path.parent / 'checkpoints'}"
            ) from error
        return kept


def define() -> Flags:
    """One flag for every field of `TrainConfig` that has a `Knob`."""
    values = Flags()
    for field, kind, known in fields_of(TrainConfig):
        if field.name == "data":
            values.add("data", tuple, known.help, [])
        elif field.name in KNOBS:
            values.add_knob(field.name, field.default, known=known)
        else:
            kind = {float | None: float, int | None: int}.get(kind, kind)
            values.add(field.name, kind, known.help, field.default, choices=known.choices, least=known.least)
    return values


def from_flags(values: Flags) -> TrainConfig:
    """The settings of this command line; with `--resume`, those of the run it goes on with, changed by the flags given.

    Raises:
      ValueError: a setting out of range, a folder that already holds a run, or nothing to resume.
    """
    given: dict[str, Any] = {name: values[name].value for name in values if values[name].present}
    if "data" in given:
        given["data"] = tuple(given["data"])
    given |= _processes(given)
    run_dir = given.get("run_dir") or _default_run_dir(resume=bool(given.get("resume")))
    path = pathlib.Path(run_dir, "config.json")
    weights = pathlib.Path(given.get("init_from") or ".")
    if not weights.is_dir():
        raise ValueError(
            f"--init_from={weights} is no folder: name one with config.json and safetensors, or a run's checkpoints/"
        )
    if given.get("resume"):
        if not path.is_file():
            raise ValueError(f"--resume: {path} does not exist; name the folder of an earlier run with --run_dir")
        if given.get("init_from"):
            raise ValueError(f"--init_from={given['init_from']} starts a new run: leave --resume away, or this")
        renewed: dict[str, Any] = {"of_weights": None} if "model" in given else {}
        renewed |= {"of_data": ""} if "data" in given else {}
        given = {**TrainConfig.kept(path), **renewed, **given}
    elif path.exists():
        raise ValueError(
            f"--run_dir={run_dir} already holds a run: add --resume to go on with it, or take another folder"
        )
    elif given.get("init_from") and "model" not in given:
        if not config_file(weights).is_file():
            raise ValueError(f"--init_from={weights} has no config.json that says its model: name it with --model")
        given |= {"of_weights": read_config(weights), "model": weights.absolute().name}
    config = TrainConfig(**{**given, "run_dir": str(run_dir)})
    if config.init_from and not config.resume:
        _check_weights(config)
    return config


def _processes(given: dict[str, Any]) -> dict[str, Any]:
    """The settings of the flags, or of the launcher, that say which of several processes this is.

    Raises:
      ValueError: some are missing: a process that does not know of the others would train by itself.
    """
    job = launch.find(given.get("coordinator"), given.get("num_processes"), given.get("process_id"))
    if job.num_processes == 1:
        return {"num_processes": 1, "process_id": 0}
    if not given.get("run_dir"):
        raise ValueError(f"--run_dir missing: the {job.num_processes} processes of a run need the same one")
    return {"coordinator": job.coordinator, "num_processes": job.num_processes, "process_id": job.process_id}


def _parse_kept(kept: dict[str, Any]) -> dict[str, Any]:
    for name in ("coordinator", "num_processes", "process_id", "restore", "history"):
        kept.pop(name, None)
    for field, kind, _ in fields_of(TrainConfig):
        if kind is int and not is_integer(kept.get(field.name, 0)):
            raise ValueError(f"{field.name}={kept[field.name]!r} is no integer")
    shapes = kept.get("of_weights")
    if shapes is not None:
        model: Any = MODEL_TYPES[shapes["model_type"]][0]
        shapes = model.from_hf(shapes)
    return {**kept, "data": tuple(kept["data"]), "of_weights": shapes}


def _check_weights(config: TrainConfig) -> None:
    """Raises ValueError where --model and --shape say another model than that of the weights."""
    folder = pathlib.Path(config.init_from)
    # Old checkpoints of the trainer do not say what they are of.
    faults = config_faults(read_config(folder), config.shapes()) if config_file(folder).is_file() else []
    if faults:
        raise ValueError(
            f"--init_from={folder} is of another model than --model={config.model} --shape={config.shape}:"
            f" {'; '.join(faults)}. Leave both away to take the model of the folder"
        )


def _default_run_dir(*, resume: bool) -> str:
    # A run that was stopped before its first checkpoint is nothing to go on with.
    pattern = "[0-9]*/checkpoints/[0-9]*" if resume else "[0-9]*"
    names = {path.relative_to("runs").parts[0] for path in pathlib.Path("runs").glob(pattern)}
    numbers = [int(name) for name in names if name.isdecimal()]
    last = max(numbers, default=0)
    return f"runs/{last if resume else last + 1:04d}"


def emulate_devices(config: TrainConfig) -> None:
    """Asks XLA for enough CPU devices, unless XLA_FLAGS already asks for some. Call before JAX touches a device."""
    asked = os.environ.get("XLA_FLAGS", "")
    if _DEVICE_FLAG not in asked:
        os.environ["XLA_FLAGS"] = f"{asked} {_DEVICE_FLAG}={config.num_devices // config.num_processes}".strip()


def how_to_emulate(config: TrainConfig) -> str:
    """The sentence for those who have too few devices."""
    count = config.num_devices // config.num_processes
    return (
        f"lower it, or emulate on CPU: JAX_PLATFORMS=cpu XLA_FLAGS={_DEVICE_FLAG}={count} python -m train.pretrain ..."
    )
