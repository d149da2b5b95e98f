"""Do training scripts of others, unmodified, run over fake tensors to an answer?

`data/script_field.toml` names them: repository, commit, path, family, arguments, and what data is
made up because theirs cannot be had here. They are run from a folder of clones, one for each
repository under its own name, of which a copy is made:

    python -m benchmarks.script_field CLONES --only nanoGPT --out script_field.json

A run has ended if its outcome is "ok". Others are refused, with a sentence of memlab's or an error
that the script would have without a network as well, or they failed: the messages have to be read.
Packages that the scripts import have to be there. torchvision's compiled part is built for one
torch; beside another one its Python loads once the operators `nms` and `qnms` have schemas.
"""

import argparse
import csv
import gzip
import json
import os
import pickle
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import report

TABLE = Path(__file__).with_name("data") / "script_field.toml"
CARD = "t4"
MOST_SECONDS = 240
SAID = "O God, O God! the king and queen of lords shall speak now to thee my liege"
WORDS = SAID.split()
SPECIAL = ["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[MASK]", "[EOS]"]
PIXELS = 96
CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {% generation %}{{ m['content'] }}{% endgeneration %}"
    "{{ eos_token }}{% endfor %}"
)
METRIC = """
import datasets
import evaluate
class Accuracy(evaluate.Metric):
    def _info(self):
        kind = datasets.Value("int64")
        features = datasets.Features({"predictions": kind, "references": kind})
        return evaluate.MetricInfo(description="", citation="", features=features)
    def _compute(self, predictions, references):
        return {"accuracy": sum(p == r for p, r in zip(predictions, references)) / len(references)}
"""


def _sentence(length: int = 30) -> str:
    return " ".join(random.choices(WORDS, k=length))


def _picture(path: Path) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.randint(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def text(path: Path) -> None:
    """Make a file of sentences."""
    path.write_text("\n".join(_sentence() for _ in range(3000)))


def lines(path: Path) -> None:
    """Make a file of short words."""
    path.write_text("\n".join("".join(random.choices("abcde", k=6)) for _ in range(2000)))


def tokens(path: Path) -> None:
    """Make the files of nanoGPT's characters."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "val.bin"):
        np.random.randint(0, 65, 20_000, dtype=np.uint16).tofile(path / name)
    letters = [chr(33 + number) for number in range(65)]
    known = {
        "vocab_size": 65,
        "itos": dict(enumerate(letters)),
        "stoi": dict(zip(letters, range(65), strict=True)),
    }
    (path / "meta.pkl").write_bytes(pickle.dumps(known))


def wikitext(path: Path) -> None:
    """Make its three files."""
    path.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        text(path / f"{name}.txt")


def mnist(path: Path) -> None:
    """Make MNIST's files, of fewer digits."""
    raw = path / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", 1024), ("t10k", 256)):
        pixels = np.random.randint(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.random.randint(0, 10, count, dtype=np.uint8)
        for kind, head, values in (
            ("images-idx3", (2051, count, 28, 28), pixels),
            ("labels-idx1", (2049, count), labels),
        ):
            content = np.array(head, dtype=">i4").tobytes() + values.tobytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(content)
            (raw / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


def pictures(path: Path) -> None:
    """Make a folder of pictures."""
    for number in range(8):
        _picture(path / f"{number}.jpg")
    _picture(path / "made.jpg")


def masks(path: Path) -> None:
    """Make a folder of masks of two classes, for `pictures`."""
    from PIL import Image

    path.mkdir(parents=True, exist_ok=True)
    for name in (*range(8), "made"):
        pixels = np.random.randint(0, 2, (PIXELS, PIXELS), dtype=np.uint8)
        Image.fromarray(pixels).save(path / f"{name}_mask.gif")


def images(path: Path) -> None:
    """Make pictures of six classes, in folders for training and validation."""
    for part, count in (("train", 24), ("val", 12)):
        for number in range(count):
            _picture(path / part / "abcdef"[number % 6] / f"{number}.jpg")


def pets(path: Path) -> None:
    """Make pictures whose names begin with their class."""
    for number in range(40):
        _picture(path / f"{'ab'[number % 2]}_{number}.jpg")


def captioned(path: Path) -> None:
    """Make pictures and a table of what they show."""
    pictures(path)
    with (path / "metadata.jsonl").open("w") as file:
        for each in sorted(path.glob("*.jpg")):
            file.write(json.dumps({"file_name": each.name, "text": _sentence(5)}) + "\n")


def weights(path: Path) -> None:
    """Make the weights that torchvision would download for a model: `vgg16/IMAGENET1K_V1`."""
    import torch
    from torchvision import models

    made = models.get_model(path.parent.name)
    url = models.get_model_weights(path.parent.name)[path.name].url
    torch.save(made.state_dict(), _cache("TORCH_HOME", "hub/checkpoints", url.rpartition("/")[2]))


def hub(path: Path) -> None:
    """Make the weights that timm would download for a model: `resnet50d/ra2_in1k`."""
    import timm
    from safetensors.torch import save_file

    name = f"models--timm--{path.parent.name}.{path.name}"
    _cache("HF_HOME", f"hub/{name}/refs", "main").write_text("made")
    state = timm.create_model(path.parent.name).state_dict()
    save_file(state, _cache("HF_HOME", f"hub/{name}/snapshots/made", "model.safetensors"))


def _cache(variable: str, folder: str, name: str) -> Path:
    place = Path(os.environ[variable]) / folder
    place.mkdir(parents=True, exist_ok=True)
    return place / name


def waves(path: Path) -> None:
    """Make its table of sines."""
    import torch

    numbers = np.sin(np.arange(1000)[None] / 20 + np.random.randint(-80, 80, (100, 1)))
    torch.save(numbers, path)


def cora(path: Path) -> None:
    """Make a graph of 2,708 papers and 5,429 citations."""
    path.mkdir(parents=True, exist_ok=True)
    features = np.random.random((2708, 1433)) < 0.01
    with (path / "cora.content").open("w") as file:
        for number, row in enumerate(features.astype(int)):
            file.write(" ".join(map(str, [number, *row, f"class{number % 7}"])) + "\n")
    np.savetxt(path / "cora.cites", np.random.randint(0, 2708, (5429, 2)), fmt="%d")


def coco(path: Path) -> None:
    """Make pictures with boxes, as COCO of 2017 has them."""
    for part in ("train2017", "val2017"):
        boxes, found = [], []
        for number in range(1, 13):
            _picture(path / part / f"{number}.jpg")
            found.append(
                {"id": number, "file_name": f"{number}.jpg", "width": PIXELS, "height": PIXELS}
            )
            for corner in (8, 30):
                boxes.append(
                    {
                        "id": len(boxes) + 1,
                        "image_id": number,
                        "category_id": 1 + corner % 3,
                        "bbox": [corner, corner, 40, 40],
                        "area": 1600,
                        "iscrowd": 0,
                        "segmentation": [
                            [corner, corner, corner + 40, corner, corner + 40, corner + 40]
                        ],
                    }
                )
        kinds = [{"id": number, "name": str(number)} for number in range(1, 4)]
        (path / "annotations").mkdir(exist_ok=True)
        (path / "annotations" / f"instances_{part}.json").write_text(
            json.dumps({"images": found, "annotations": boxes, "categories": kinds})
        )


def pairs(path: Path) -> None:
    """Make a table of two sentences and a label."""
    with path.open("w") as file:
        table = csv.writer(file)
        table.writerow(("sentence1", "sentence2", "label"))
        table.writerows((_sentence(9), _sentence(9), number % 2) for number in range(200))


def mrpc(path: Path) -> None:
    """Make MRPC of GLUE: pairs of sentences, numbered."""
    path.mkdir(parents=True, exist_ok=True)
    for part in ("train", "validation", "test"):
        rows = [
            {
                "sentence1": _sentence(9),
                "sentence2": _sentence(9),
                "label": number % 2,
                "idx": number,
            }
            for number in range(200)
        ]
        (path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    parts = "".join(
        f"  - split: {part}\n    path: {part}.jsonl\n" for part in ("train", "validation", "test")
    )
    (path / "README.md").write_text(
        f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{parts}---\n"
    )


def chats(path: Path) -> None:
    """Make questions with answers."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": _sentence(9)},
                {"role": "assistant", "content": _sentence(9)},
            ]
        }
        for _ in range(200)
    ]
    _as_dataset(path, rows)


def preferred(path: Path) -> None:
    """Make answers of which one is preferred."""
    talk = [{"role": "user", "content": _sentence(9)}]
    rows = [
        {
            name: [*talk, {"role": "assistant", "content": _sentence(9)}]
            for name in ("chosen", "rejected")
        }
        for _ in range(200)
    ]
    _as_dataset(path, rows)


def _as_dataset(path: Path, rows: list[dict[str, Any]]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for part in ("train", "test"):
        (path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def accuracy(path: Path) -> None:
    """Make a metric of `evaluate`, which has to be downloaded otherwise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(METRIC)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL)
    made.train_from_iterator([_sentence() for _ in range(100)], trainer)
    numbers = [(name, SPECIAL.index(name)) for name in ("[CLS]", "[SEP]")]
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=numbers
    )
    found = PreTrainedTokenizerFast(
        tokenizer_object=made,
        unk_token="[UNK]",
        pad_token="[PAD]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        eos_token="[EOS]",
    )
    found.chat_template = CHAT
    return found


def gpt2(path: Path) -> None:
    """Make a GPT-2 of 4 blocks."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=500, n_embd=256, n_layer=4, n_head=4, n_positions=256)
    GPT2LMHeadModel(config).save_pretrained(path)
    _tokenizer().save_pretrained(path)


def llama(path: Path) -> None:
    """Make a Llama of 4 blocks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=500,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=1,
        eos_token_id=5,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    _tokenizer().save_pretrained(path)


def bert(path: Path) -> None:
    """Make a BERT of 4 blocks."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=500,
        hidden_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=1024,
        pad_token_id=1,
    )
    BertForSequenceClassification(config).save_pretrained(path)
    _tokenizer().save_pretrained(path)


def vit(path: Path) -> None:
    """Make a ViT of 4 blocks."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    config = ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=3, intermediate_size=768
    )
    ViTForImageClassification(config).save_pretrained(path)
    ViTImageProcessor().save_pretrained(path)


def diffuser(path: Path) -> None:
    """Make a pipeline of Stable Diffusion, of few channels."""
    from diffusers import (
        AutoencoderKL,
        DDPMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    path.mkdir(parents=True, exist_ok=True)
    letters = [chr(number) for number in range(97, 123)]
    known = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (path / "vocab.json").write_text(json.dumps({name: at for at, name in enumerate(known)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CLIPTokenizer(
        str(path / "vocab.json"), str(path / "merges.txt"), model_max_length=77
    )
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    StableDiffusionPipeline(
        vae=AutoencoderKL(
            block_out_channels=(32, 64),
            down_block_types=("DownEncoderBlock2D",) * 2,
            up_block_types=("UpDecoderBlock2D",) * 2,
            latent_channels=4,
        ),
        text_encoder=CLIPTextModel(
            CLIPTextConfig(
                vocab_size=len(known),
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
            )
        ),
        tokenizer=tokenizer,
        unet=UNet2DConditionModel(
            block_out_channels=(32, 64),
            down_block_types=down,
            up_block_types=up,
            cross_attention_dim=32,
            sample_size=32,
        ),
        scheduler=DDPMScheduler(),
        safety_checker=None,
        feature_extractor=None,
    ).save_pretrained(path)


MAKERS: dict[str, Callable[[Path], None]] = {
    made.__name__: made
    for made in (
        text,
        lines,
        tokens,
        wikitext,
        mnist,
        pictures,
        masks,
        images,
        pets,
        captioned,
        waves,
        weights,
        hub,
        cora,
        coco,
        pairs,
        mrpc,
        chats,
        preferred,
        accuracy,
        gpt2,
        llama,
        bert,
        vit,
        diffuser,
    )
}


def row_of(row: dict[str, str], clones: Path) -> dict[str, Any]:
    """Return how one script ended, and its peak."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {name: str(Path(folder) / name) for name in ("TORCH_HOME", "HF_HOME")}
        name = row["repository"].rpartition("/")[2]
        shutil.copytree(clones / name, Path(folder) / name, symlinks=True)
        script = Path(folder) / name / row["path"]
        for each in row.get("data", "").split():
            maker, _, place = each.partition(":")
            target = script.parent / place
            target.parent.mkdir(parents=True, exist_ok=True)
            MAKERS[maker](target)
        paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
        if "python_path" in row:
            paths.append(str((script.parent / row["python_path"]).resolve()))
        command = [
            sys.executable,
            "-m",
            "memlab",
            "run",
            "--json",
            "--device",
            CARD,
            "--timeout",
            str(MOST_SECONDS),
            *row.get("options", "").split(),
            script.name,
            *shlex.split(row.get("arguments", "")),
        ]
        start = time.perf_counter()
        done = subprocess.run(
            command,
            cwd=script.parent,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        seconds = time.perf_counter() - start
    try:
        found = json.loads(done.stdout.strip().splitlines()[-1])
    except (ValueError, IndexError):
        found = {"outcome": "failed", "message": f"no answer: {done.stderr[-300:]}"}
    stages = [stage["name"] for stage in found.get("stages", ())]
    return {
        "script": f"{name}/{row['path']}"[-48:],
        "family": row["family"],
        "outcome": found["outcome"],
        "exit": done.returncode,
        "seconds": round(seconds, 1),
        "peak": found.get("peak_allocated_bytes") or 0,
        "stages": ", ".join(stages),
        "message": found["message"],
        "notes": found.get("notes", ()),
    }


def main() -> None:
    """Run all scripts of the table, or those whose repository and path have a word in them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("clones", type=Path, help="folder of the repositories' clones")
    parser.add_argument("--only", default=("",), nargs="*", help="parts of repository and path")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks/script_field.json"))
    given = parser.parse_args()
    before = report.environment()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    table = tomllib.loads(TABLE.read_text())
    rows = []
    for row in table["script"]:
        if any(part in f"{row['repository']}/{row['path']}" for part in given.only):
            random.seed(0)
            np.random.seed(0)
            found = row_of(row, given.clones.resolve())
            rows.append({**row, "commit": table["commits"][row["repository"]], **found})
            print(found["outcome"], found["seconds"], found["script"], found["message"], flush=True)
            given.out.write_text(json.dumps({**before, "scripts": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
