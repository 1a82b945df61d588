"""Our plugins in TRL's SFTTrainer, on a tiny model with random weights and a tokenizer of ten words."""

from __future__ import annotations

from pathlib import Path

import pytest
from heliograph import EarlyStopping, LogSchedule, NaNGuard
from heliograph_bridges.huggingface import HeliographCallback
from heliograph_recorder import Recorder

WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog"]
SPECIAL = ["<pad>", "<eos>", "<unk>"]


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:.*is deprecated and will:FutureWarning")
def test_supervised_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer  # type: ignore[attr-defined]

    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = dict(zip(("pad_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **names)  # type: ignore[no-untyped-call]
    config = LlamaConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        pad_token_id=0, eos_token_id=1, bos_token_id=1,
    )  # fmt: skip
    data = Dataset.from_dict({"text": [" ".join(WORDS[shift:] + WORDS[:shift]) for shift in range(8)]})
    plugins = [EarlyStopping(patience=1, min_delta=9.0), Recorder(tmp_path / "records"), NaNGuard("stop")]
    callback = HeliographCallback([*plugins, LogSchedule(steps=1)])
    trainer = SFTTrainer(
        model=LlamaForCausalLM(config),
        args=SFTConfig(
            output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to=[], disable_tqdm=True, max_steps=9,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, eval_strategy="steps", eval_steps=1,
            save_strategy="no", max_length=16, dataloader_pin_memory=False,
        ),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        callbacks=[callback],
    )  # fmt: skip
    trainer.train()
    result = callback.result
    assert result is not None
    assert (result.stopped_by, trainer.state.global_step, result.progress.samples) == ("early_stopping", 2, 8)
    assert result.metrics["train/loss"] == trainer.state.log_history[-3]["loss"]
    assert {"train/mean_token_accuracy", "validation/mean_token_accuracy", "train/num_tokens"} <= result.metrics.keys()
    assert result.recording is not None
