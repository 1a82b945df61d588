"""What the words of other frameworks are here, in errors."""

from __future__ import annotations

from typing import Any

import pytest
from heliograph import Trainer
from heliograph.core.system.errors import WORDS, hint
from heliograph.tests import kit


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("resume", r"Checkpoint\(folder, resume='auto'\)"),
        ("ckpt_path", r"Checkpoint\(folder, resume='auto'\)"),
        ("max_steps", "epochs= or steps="),
        ("val_dataloaders", "validation="),
        ("callbacks", r"Trainer\(\[EarlyStopping\(\), \.\.\.\]\)"),
        ("batch_size", "loader_params="),
        ("lr", "optimizer=partial"),
        ("device", r"Trainer\(device='cuda'\)"),
        ("precision", r"Trainer\(precision='bf16'"),
    ],
)
def test_fit_explains_the_words_of_other_frameworks(word: str, words: str) -> None:
    with pytest.raises(TypeError, match=rf"^fit has no argument {word!r}\. .*{words}"):
        kit.fit(**{word: 3})


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("callbacks", r"Trainer\(\[EarlyStopping\(\), \.\.\.\]\)"),
        ("max_epochs", "epochs= or steps="),
        ("epochs", "epochs= or steps="),
        ("logger", r"JsonlLog\(path\)"),
        ("accelerator", r"Trainer\(device='cuda'\)"),
        ("gradient_clip_val", r"GradientClipping\(1\.0\)"),
        ("accumulate_grad_batches", r"GradientAccumulation\(4\)"),
        ("optimizer", "argument of fit"),
        ("seed", r"RNGCapture\(seed\)"),
    ],
)
def test_the_trainer_explains_them_too(word: str, words: str) -> None:
    options: dict[str, Any] = {word: 3}
    with pytest.raises(TypeError, match=rf"^Trainer has no option {word!r}\. .*{words}"):
        Trainer(**options)


def test_a_misspelt_argument_gets_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"^fit has no argument 'epoch'\. Did you mean 'epochs'\?"):
        kit.fit(epoch=3)


def test_each_word_is_explained_once() -> None:
    words = [word for each in WORDS.values() for word in each.split()]

    assert len(words) == len(set(words))
    assert hint("schedular") == ""
