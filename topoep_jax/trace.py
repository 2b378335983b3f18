"""Demand that was recorded from a real router: reads it from NumPy files.

A trace is one of two arrays, with any leading axes (steps, layers): they are flattened into samples.

* `omega`, integers [..., R, E]: assignments from each source rank to each expert.
* `expert_idx`, integers [..., R, T, K]: the experts of each rank's tokens, below 0 where a token is padding.

A `.npz` file holds the one or the other under that name; a `.npy` file holds `omega`.
"""

import pathlib
import tokenize
import zipfile

import numpy as np

from topoep_jax.plan.cost import MAX_ROWS

MAX_EXPERTS = 2**16
"""Most experts of a trace: more is a slip of the pen, and would only fill the memory."""


def read_trace(path: str | pathlib.Path, num_experts: int | None = None) -> np.ndarray:
    """int64 [samples, R, E], the demand of every sample in a trace file.

    Args:
      path: a `.npy` or `.npz` file.
      num_experts: E, needed for `expert_idx`, and checked if `omega` is given.

    Raises:
      ValueError: another kind of file or array; an expert outside 0..E-1; more experts than `MAX_EXPERTS`, or not a
        multiple of the ranks; demand that is negative or, in a sample, sums to 2^31 or more.
      OSError: the file cannot be read.
    """
    name, array = _load(pathlib.Path(path))
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{path}: {name} has dtype {array.dtype}, but a trace holds integers")
    axes = {"omega": ("R", "E"), "expert_idx": ("R", "T", "K")}[name]
    if array.ndim < len(axes) or 0 in array.shape:
        raise ValueError(f"{path}: {name} has shape {array.shape}, expected [..., {', '.join(axes)}], none of them 0")
    samples = array.reshape(-1, *array.shape[-len(axes) :])
    if name == "omega":
        return _checked_omega(path, samples, num_experts)
    if num_experts is None:
        raise ValueError(f"{path}: expert_idx does not say how many experts there are: give their number")
    if samples.max() >= num_experts:
        raise ValueError(f"{path}: expert_idx names expert {samples.max()}, but there are {num_experts}")
    num_ranks = samples.shape[1]
    _check_experts(path, num_experts, num_ranks)
    omega = np.zeros((samples.shape[0], num_ranks, num_experts), np.int64)
    for sample, rank in np.ndindex(omega.shape[:2]):
        chosen = samples[sample, rank].ravel()
        omega[sample, rank] = np.bincount(chosen[chosen >= 0], minlength=num_experts)
    return omega


def _load(path: pathlib.Path) -> tuple[str, np.ndarray]:
    """Name and values of the array in a file."""
    if path.suffix not in (".npy", ".npz"):
        raise ValueError(f"{path}: a trace is a .npy or .npz file")
    try:
        loaded = np.load(path, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return "omega", loaded
        with loaded:
            names = [name for name in ("omega", "expert_idx") if name in loaded]
            if len(names) == 1:
                return names[0], loaded[names[0]]
            held = sorted(loaded)
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path}: not a readable NumPy file ({error})") from error
    raise ValueError(f"{path} holds {held}, expected exactly one of 'omega' and 'expert_idx'")


def _check_experts(path: str | pathlib.Path, num_experts: int, num_ranks: int) -> None:
    if not 0 < num_experts <= MAX_EXPERTS or num_experts % num_ranks:
        raise ValueError(
            f"{path}: {num_experts} experts on {num_ranks} ranks: give a multiple of {num_ranks}, at most {MAX_EXPERTS}"
        )


def _checked_omega(path: str | pathlib.Path, omega: np.ndarray, num_experts: int | None) -> np.ndarray:
    if num_experts not in (None, omega.shape[2]):
        raise ValueError(f"{path}: omega has {omega.shape[2]} experts, but {num_experts} were asked for")
    if (omega < 0).any():
        sample, rank, expert = np.argwhere(omega < 0)[0]
        value = omega[sample, rank, expert]
        raise ValueError(f"{path}: omega[{rank}, {expert}]={value} of sample {sample} is negative; demand counts rows")
    # Compared before any cast or sum, which could wrap.
    if (omega > MAX_ROWS).any() or (omega.astype(np.float64).sum(axis=(1, 2)) > MAX_ROWS).any():
        raise ValueError(f"{path}: a sample of omega holds 2^31 rows or more; plan smaller microbatches")
    return omega.astype(np.int64)
