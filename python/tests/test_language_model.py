# SPDX-License-Identifier: Apache-2.0
"""The example model: decoding from the state is what prefill of the whole text gives, and the weights are trained."""
import pathlib
import subprocess
import sys

import torch
import torch.nn.functional as F

from libkda import chunk_kda

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "language_model"
sys.path.insert(0, str(FOLDER))
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


def test_command():
    run = subprocess.run([sys.executable, FOLDER / "generate.py", "The state", "--bytes", "20", "--device", "cpu"],
                         capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("The state") and len(run.stdout.encode()) >= 29 and "bytes/s" in run.stderr
