"""Runs the variants in `transformers`, and writes what it computes; or compares with what is written.

    python -m tests.parity.make_golden                  writes tests/parity/golden/*.npz
    python -m tests.parity.make_golden --check          computes them anew and compares
    python -m tests.parity.make_golden --check --folders DIR
                                                        from checkpoints DIR/<variant>, which must hold the same weights
    python -m tests.parity.make_golden --save DIR       writes the checkpoints as transformers does, to DIR/<variant>

Needs torch, transformers 5 and safetensors, from the root of the checkout; no JAX, and nothing is downloaded. A golden
file holds, all in f32 unless said: logits [batch, length, vocab], 0 on padding; experts uint8 [MoE layers, batch,
length, K], in rising order, 255 on padding; loss, the mean cross-entropy of the next tokens; grad:<tensor name>; and
versions of torch and transformers. Weights and tokens are not in it: variants.py makes them.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

import numpy as np
import safetensors
import torch
import transformers

from tests.parity import variants
from tests.parity.variants import VARIANTS, Variant

# Router scores (softmax or sigmoid, bias added) between the last chosen expert and the next: f32 never turns these.
MIN_MARGIN = 5e-4
ABSOLUTE, RELATIVE = 2e-5, 2e-4


def load(variant: Variant, folder: Path) -> torch.nn.Module:
    """The model in f32 from a folder of safetensors under the released names, each of which must be known."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(info.values()):
        raise SystemExit(f"{variant.name}: transformers does not take the checkpoint as it is: {info}")
    expected = variants.tensors_of(variant)
    state = released(variant, model.state_dict())
    for name in {*expected, *state} - {"lm_head.weight"}:
        if name not in expected or name not in state or not np.array_equal(expected[name], state[name]):
            raise SystemExit(f"{variant.name}: {name} of the loaded model differs from the checkpoint")
    return model.train()


def released(variant: Variant, tensors: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Tensors of the model in memory under the released names: it keeps the experts of a layer in one."""
    inner = variant.config["moe_intermediate_size"]
    result = {}
    for name, tensor in tensors.items():
        value = tensor.detach().numpy()
        match = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if not match:
            result[name] = value
            continue
        for expert, part in enumerate(value):
            if match[2] == "down":
                result[f"{match[1]}.{expert}.down_proj.weight"] = part
            else:
                result[f"{match[1]}.{expert}.gate_proj.weight"] = part[:inner]
                result[f"{match[1]}.{expert}.up_proj.weight"] = part[inner:]
    return result


def compute(variant: Variant, folder: Path) -> dict[str, np.ndarray]:
    """The contents of the golden file."""
    model = load(variant, folder)
    batch = variants.batch_of(variant)
    valid = batch["segments"] > 0
    chosen: dict[int, np.ndarray] = {}
    margins = []
    for layer in variant.moe_layers:

        def record(gate: torch.nn.Module, _: object, output: tuple[torch.Tensor, ...], layer: int = layer) -> None:
            chosen[layer] = np.sort(output[2].numpy().reshape(*valid.shape, -1), axis=-1)
            margins.append(margin_of(variant, gate, output)[valid.reshape(-1)].min())

        model.model.layers[layer].mlp.gate.register_forward_hook(record)
    logits = model(
        input_ids=torch.tensor(batch["tokens"], dtype=torch.int64),
        position_ids=torch.tensor(batch["positions"], dtype=torch.int64),
        attention_mask=attention_mask(batch["segments"]),
        use_cache=False,
    ).logits
    labels = torch.tensor(variants.next_tokens_of(batch), dtype=torch.int64)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten())
    loss.backward()
    gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    gradients = released(variant, gradients)
    print(f"{variant.name:18} loss {loss:.4f}  |logits| {logits.abs().max():.2f}  margin {min(margins):.5f}")
    if min(margins) < MIN_MARGIN:
        raise SystemExit(f"{variant.name}: a token is near a tie between experts ({min(margins)}): change the seed")
    experts = np.stack([chosen[layer] for layer in variant.moe_layers])
    return {
        "logits": np.where(valid[..., None], logits.detach().numpy(), np.float32(0)),
        "experts": np.where(valid[..., None], experts, 255).astype(np.uint8),
        "loss": loss.detach().numpy(),
        **{f"grad:{name}": gradients[name] for name in variants.gradients_of(variant)},
        "versions": np.array([f"torch {torch.__version__}", f"transformers {transformers.__version__}"]),
    }


def attention_mask(segments: np.ndarray) -> torch.Tensor:
    """f32 [batch, 1, length, length] added to the scores: 0 where a token sees another, else the least number."""
    length = segments.shape[1]
    sees = (segments[:, :, None] == segments[:, None, :]) & np.tri(length, dtype=bool)
    return torch.where(torch.tensor(sees[:, None]), 0.0, torch.finfo(torch.float32).min)


def margin_of(variant: Variant, gate: torch.nn.Module, output: tuple[torch.Tensor, ...]) -> np.ndarray:
    """The margin by which each token prefers its last choice to the next, among experts and among groups."""
    logits = output[0].detach()
    top_k = output[2].shape[-1]
    if variant.config["model_type"] == "glm4_moe":
        return gap(logits.sigmoid() + gate.e_score_correction_bias, top_k)
    scores = logits.softmax(-1)
    if variant.config.get("n_group", 1) == 1:
        return gap(scores, top_k)
    best = scores.unflatten(-1, (variant.config["n_group"], -1)).amax(-1)
    kept = torch.zeros_like(best).scatter(1, best.topk(variant.config["topk_group"])[1], 1.0)
    within = scores * kept.repeat_interleave(scores.shape[1] // best.shape[1], 1)
    return np.minimum(gap(best, variant.config["topk_group"]), gap(within, top_k))


def gap(scores: torch.Tensor, count: int) -> np.ndarray:
    """[T]: score number `count` less the one after it."""
    ordered = scores.sort(descending=True)[0]
    return (ordered[:, count - 1] - ordered[:, count]).numpy()


def differences(new: dict[str, np.ndarray], old: dict[str, np.ndarray]) -> list[str]:
    """What differs beyond rounding."""
    wrong = [f"only one has {name}" for name in sorted(new.keys() ^ old.keys())]
    for name in sorted(new.keys() & old.keys() - {"versions"}):
        if new[name].shape != old[name].shape:
            wrong.append(f"{name}: shapes {new[name].shape} and {old[name].shape}")
        elif new[name].dtype == np.uint8:
            count = int((new[name] != old[name]).sum())
            wrong += [f"{name}: {count} entries"] if count else []
        else:
            error = np.abs(new[name] - old[name]).max()
            limit = ABSOLUTE if name == "logits" else RELATIVE * np.abs(old[name]).max()
            wrong += [] if error <= limit else [f"{name}: {error} > {limit}"]
    return wrong


def main() -> None:
    """Runs what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the files, and write none")
    parser.add_argument("--folders", type=Path, metavar="DIR", help="folder of checkpoints named as the variants")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write checkpoints, and no golden files")
    arguments = parser.parse_args()
    if arguments.folders and not arguments.check:
        parser.error("--folders needs --check: golden files come from variants.py alone")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, safetensors {safetensors.__version__}")
    torch.set_num_threads(1)
    transformers.logging.disable_progress_bar()
    wrong = []
    for variant in VARIANTS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = arguments.folders / variant.name if arguments.folders else Path(scratch)
            if not arguments.folders:
                variants.write_folder(folder, variant)
            if arguments.save:
                load(variant, folder).save_pretrained(arguments.save / variant.name, max_shard_size="50KB")
                continue
            golden = compute(variant, folder)
        if arguments.check:
            with np.load(variant.golden) as stored:
                wrong += [f"{variant.name}: {text}" for text in differences(golden, dict(stored))]
        else:
            variant.golden.parent.mkdir(exist_ok=True)
            np.savez_compressed(variant.golden, **golden)
    if wrong:
        sys.exit("differs from the golden files:\n" + "\n".join(wrong))


if __name__ == "__main__":
    main()
