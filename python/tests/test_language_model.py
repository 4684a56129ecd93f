# SPDX-License-Identifier: Apache-2.0
"""The example model: decoding from the state is what prefill of the whole text gives, the weights are trained, and
training goes on where it stopped."""
import pathlib
import signal
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from libkda import chunk_kda

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "language_model"
sys.path.insert(0, str(FOLDER))
import train  # noqa: E402
from generate import generate  # noqa: E402
from model import WEIGHTS, load  # noqa: E402


def test_decode_continues_prefill(device):
    model = load(device)
    prompt = b"A plan for any GPU can be made"
    found = list(generate(model, prompt, 40, temperature=0))
    text = list(prompt)
    with torch.inference_mode():
        for byte in found:
            logits, _ = model(torch.tensor([text], device=device), chunk_kda)
            assert logits[0, -1].argmax().item() == byte
            text.append(byte)


def test_weights_have_learned_the_language(device):
    """English text costs an untrained model 8 bits a byte, letter frequencies alone about 4.3."""
    assert WEIGHTS.stat().st_size < 3e6
    text = b"The state of a sequence is read once and written once, and the tokens of the next chunk follow.\n"
    tokens = torch.tensor([list(text)], device=device)
    with torch.inference_mode():
        logits, _ = load(device)(tokens, chunk_kda)
    bits = F.cross_entropy(logits[0, :-1], tokens[0, 1:]).item() / 0.6931
    assert bits < 3.6


def run_training(folder, *arguments, code=0):
    run = subprocess.run([sys.executable, FOLDER / "train.py", *map(str, arguments)], cwd=folder, capture_output=True,
                         text=True, check=False)
    assert run.returncode == code, run.stderr
    return run.stderr


SMALL = ("--batch", 2, "--tokens", 40)


def test_training(tmp_path):
    """Loss and pace are shown; the weights are those that generate.py reads, and better than the first ones."""
    text = tmp_path / "text"
    text.write_text("the cat sat on the mat and ate. " * 30)
    shown = run_training(tmp_path, text, "--steps", 60, *SMALL, "--rate", 0.01)
    assert "step 50/60" in shown and "step 60/60" in shown and "bits a byte" in shown and "tokens/s" in shown
    bits = float(shown.rpartition("step 60/60")[2].split()[0])
    assert bits < 4, shown
    run = subprocess.run([sys.executable, FOLDER / "generate.py", "the cat", "--bytes", "5", "--device", "cpu",
                          "--weights", tmp_path / "model.safetensors"], capture_output=True, text=True, check=False)
    assert run.returncode == 0 and run.stdout.startswith("the cat"), run.stderr


def test_training_resumes_to_the_bit(tmp_path):
    text = tmp_path / "text"
    text.write_text("abcdefgh" * 40)
    run_training(tmp_path, text, "--steps", 6, *SMALL, "--output", "whole.safetensors", "--save-every", 4)
    start = [text, "--steps", 6, *SMALL, "--checkpoint", "kept", "--output", "resumed.safetensors"]
    stop = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import train
save = train.save_checkpoint
def save_and_stop(*arguments):
    save(*arguments)
    sys.exit(3)
train.save_checkpoint = save_and_stop
train.main()
"""
    run = subprocess.run([sys.executable, "-c", stop, FOLDER, *map(str, start), "--save-every", "4"], cwd=tmp_path,
                         capture_output=True, text=True, check=False)
    assert run.returncode == 3 and not (tmp_path / "resumed.safetensors").exists(), run.stderr
    shown = run_training(tmp_path, *start, "--resume")
    assert "steps 5 to 6" in shown
    assert (tmp_path / "resumed.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()


@pytest.mark.parametrize("arguments, text", [
    (["none.txt"], "none.txt is no file"), (["--steps", "0"], "--steps must be at least 1, got 0"),
    (["--resume"], "there is no checkpoint model.checkpoint"), (["--tokens", "10000000"], "a piece needs 10000001")])
def test_training_says_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
    with pytest.raises(SystemExit) as left:
        train.main()
    assert left.value.code == 2 and text in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_help_teaches(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["train.py", "--help"])
    with pytest.raises(SystemExit):
        train.main()
    shown = capsys.readouterr().out
    assert "libkda.chunk_kda" in shown and "--resume" in shown and "generate.py" in shown


def test_training_stops_and_keeps_a_checkpoint(tmp_path):
    text = tmp_path / "text"
    text.write_text("abcdefgh" * 40)
    run = subprocess.Popen([sys.executable, FOLDER / "train.py", text, "--steps", "100000", *map(str, SMALL)],
                           cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while "step 50/" not in run.stderr.readline():
        assert run.poll() is None
    run.send_signal(signal.SIGINT)
    assert "--resume goes on from model.checkpoint" in run.communicate()[1] and run.returncode == 130
    assert (tmp_path / "model.checkpoint").is_file()


def test_command():
    run = subprocess.run([sys.executable, FOLDER / "generate.py", "The state", "--bytes", "20", "--device", "cpu"],
                         capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("The state") and len(run.stdout.encode()) >= 29 and "bytes/s" in run.stderr
