"""Models of transformers and PEFT, tiny and random: dict batches, their schedulers, exact resume, adapters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from heliograph import (
    BatchEnd,
    Checkpoint,
    Every,
    LearningRate,
    LogSchedule,
    RNGCapture,
    SaveSchedule,
    Supervised,
    TrainedOnly,
    Trainer,
)
from heliograph.core.engines.movers import move
from heliograph.tests import kit
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from transformers import BatchEncoding, GPT2Config, GPT2LMHeadModel, get_cosine_schedule_with_warmup
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # PEFT asks for it
]


def batches(count: int = 4) -> list[Any]:
    """Return batches of sentences of 8 tokens; the second half of each is padding that no loss counts."""
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(0, 32, (4, 8), generator=generator) for _ in range(count)]
    labels = [torch.where(torch.arange(8) < 4 + number, each, -100) for number, each in enumerate(ids)]
    return [BatchEncoding({"input_ids": one, "labels": other}) for one, other in zip(ids, labels, strict=True)]


def language_model(**options: Any) -> GPT2LMHeadModel:
    """Return a model with dropout, that ties two of its weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "loss_type": "ForCausalLM",
        "vocab_size": 32,
        "n_positions": 8,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **options))


def with_adapter() -> Any:
    """Return the model with a LoRA."""
    config = LoraConfig(r=2, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True)
    base = language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    torch.manual_seed(1)
    return get_peft_model(base, config)


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    """Return a scheduler of transformers for so many steps."""
    return get_cosine_schedule_with_warmup(optimizer, 2, steps)


def fit(folder: Path, model: Any, *plugins: Any, resume: Path | None = None) -> tuple[Supervised, Any]:
    """Train a model with a scheduler of transformers, and save every second step."""
    task = Supervised(model)
    saving = [RNGCapture(), SaveSchedule(Every(steps=2)), Checkpoint(folder, keep_last=None, resume=resume)]
    optimizer = partial(torch.optim.AdamW, lr=1e-2)
    everything = [*saving, LearningRate("step"), *plugins]
    return task, kit.fit(*everything, task=task, train=batches(), optimizer=optimizer, scheduler=cosine, epochs=2)


@pytest.mark.parametrize("model", [language_model, with_adapter])
def test_a_resume_within_an_epoch_is_exact(model: Any, tmp_path: Path) -> None:
    plugins = [TrainedOnly] if model is with_adapter else []
    whole, _ = fit(tmp_path, model(), *(kind() for kind in plugins))
    resume = tmp_path / "run_epoch_0_iter_2.pth"
    again, result = fit(tmp_path / "again", model(), *(kind() for kind in plugins), resume=resume)
    assert (result.resume.reasons, result.warnings) == ((), ())
    states = whole.model.state_dict().values(), again.model.state_dict().values()
    assert all(torch.equal(one, other) for one, other in zip(*states, strict=True))


def test_a_checkpoint_of_an_adapter_holds_the_adapter_and_refuses_another_base(tmp_path: Path) -> None:
    task, result = fit(tmp_path, with_adapter(), TrainedOnly())
    held = torch.load(result.last_checkpoint, weights_only=True)["modules"]["model"]
    assert {name.replace(".default", "") for name in held} == get_peft_model_state_dict(task.model).keys()
    other = with_adapter()
    with torch.no_grad():
        other.base_model.model.transformer.wpe.weight.add_(1e-3)
    with pytest.raises(ValueError, match=r"1 of \d+, such"):
        fit(tmp_path / "again", other, TrainedOnly(), resume=result.last_checkpoint)


class PerToken(Supervised):
    """Averages losses over tokens, however many a batch has."""

    def training_step(self, run: Any, batch: Any) -> Tensor:
        run.stepping.weigh((batch["labels"][:, 1:] != -100).sum())
        return super().training_step(run, batch)


def test_losses_are_weighed_by_the_tokens_that_count() -> None:
    logged: list[float] = []
    task = PerToken(language_model(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    trainer = Trainer([LogSchedule(Every(steps=4))], device="cpu")
    result = kit.fit(trainer, task=task, train=batches(), optimizer=kit.sgd(0.0))
    logged = [result.metrics["train/loss"]]
    with torch.no_grad():
        counts = [int((each["labels"][:, 1:] != -100).sum()) for each in batches()]
        means = [float(task.model(**each).loss) for each in batches()]
    assert len(set(counts)) == 4
    assert logged == [pytest.approx(sum(c * m for c, m in zip(counts, means, strict=True)) / sum(counts), rel=1e-5)]


def test_outputs_and_batches_move_and_predictions_are_the_logits() -> None:
    seen: list[Any] = []
    trainer = Trainer(device="cpu")
    trainer.bus.on(BatchEnd, lambda run, event: seen.append(run.outputs))
    task = Supervised(language_model())
    kit.fit(trainer, task=task, train=batches())
    (outputs, *_) = seen
    assert isinstance(outputs, CausalLMOutputWithCrossAttentions)
    assert outputs.logits is not None
    plain: Any = CausalLMOutputWithCrossAttentions(logits=outputs.logits.detach())
    moved: Any = move(plain, torch.device("meta"))
    assert (type(moved), moved.logits.device.type, plain.logits.device.type) == (type(plain), "meta", "cpu")
    assert type(move(batches()[0], torch.device("meta"))) is BatchEncoding
    assert trainer.predict(task, batches()).predictions.shape == (16, 8, 32)


def test_activations_are_computed_again_with_the_same_dropout() -> None:
    """`activation_checkpointing_enable` computes the forward a second time; the loss and the gradients are the same."""

    def weights(again: bool) -> Tensor:
        model = language_model(use_cache=False)
        if again:
            model.activation_checkpointing_enable()
        task = Supervised(model)
        kit.fit(task=task, train=batches())
        return model.get_parameter("transformer.h.0.mlp.c_fc.weight").detach()

    assert torch.equal(weights(again=True), weights(again=False))
