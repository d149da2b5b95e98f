"""Data that is made up for scripts of others, where theirs cannot be had here.

Each public function makes the data of its name at a path. Values are random, sizes small.
"""

import csv
import functools
import gzip
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np

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


def _picture(path: Path, shape: tuple[int, ...] = (PIXELS, PIXELS, 3), most: int = 256) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.random.randint(0, most, shape, dtype=np.uint8)).save(path)


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


def mnist(path: Path, for_training: int = 1024) -> None:
    """Make MNIST's files, of fewer digits."""
    raw = path / "MNIST" / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", for_training), ("t10k", 256)):
        pixels = np.random.randint(0, 256, (count, 28, 28), dtype=np.uint8)
        labels = np.random.randint(0, 10, count, dtype=np.uint8)
        for kind, head, values in (
            ("images-idx3", (2051, count, 28, 28), pixels),
            ("labels-idx1", (2049, count), labels),
        ):
            content = np.array(head, dtype=">i4").tobytes() + values.tobytes()
            (raw / f"{part}-{kind}-ubyte").write_bytes(content)
            (raw / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))


many_digits = functools.partial(mnist, for_training=5120)


def pictures(path: Path) -> None:
    """Make a folder of pictures."""
    for number in range(8):
        _picture(path / f"{number}.jpg")
    _picture(path / "made.jpg")


def masks(path: Path) -> None:
    """Make a folder of masks of two classes, for `pictures`."""
    for name in (*range(8), "made"):
        _picture(path / f"{name}_mask.gif", (PIXELS, PIXELS), most=2)


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
    (path / "annotations").mkdir(parents=True, exist_ok=True)
    kinds = [{"id": number, "name": str(number)} for number in range(1, 4)]
    for part in ("train2017", "val2017"):
        boxes: list[dict[str, Any]] = []
        found = [
            {"id": number, "file_name": f"{number}.jpg", "width": PIXELS, "height": PIXELS}
            for number in range(1, 13)
        ]
        for picture in found:
            _picture(path / part / str(picture["file_name"]))
            for corner in (8, 30):
                end = corner + 40
                boxes.append(
                    {"id": len(boxes) + 1, "image_id": picture["id"], "iscrowd": 0, "area": 1600,
                     "category_id": 1 + corner % 3, "bbox": [corner, corner, 40, 40],
                     "segmentation": [[corner, corner, end, corner, end, end]]}
                )  # fmt: skip
        table = {"images": found, "annotations": boxes, "categories": kinds}
        (path / "annotations" / f"instances_{part}.json").write_text(json.dumps(table))


def pairs(path: Path) -> None:
    """Make a table of two sentences and a label."""
    with path.open("w") as file:
        table = csv.writer(file)
        table.writerow(("sentence1", "sentence2", "label"))
        table.writerows((_sentence(9), _sentence(9), number % 2) for number in range(200))


def _rows(
    path: Path, rows: list[dict[str, Any]], parts: tuple[str, ...] = ("train", "test")
) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for part in parts:
        (path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def _message(role: str) -> dict[str, str]:
    return {"role": role, "content": _sentence(9)}


def mrpc(path: Path) -> None:
    """Make MRPC of GLUE: pairs of sentences, numbered."""
    names, parts = ("sentence1", "sentence2"), ("train", "validation", "test")
    rows = [
        {name: _sentence(9) for name in names} | {"label": number % 2, "idx": number}
        for number in range(200)
    ]
    _rows(path, rows, parts)
    files = "".join(f"  - split: {part}\n    path: {part}.jsonl\n" for part in parts)
    head = f"---\nconfigs:\n- config_name: mrpc\n  data_files:\n{files}---\n"
    (path / "README.md").write_text(head)


def chats(path: Path) -> None:
    """Make questions with answers."""
    _rows(path, [{"messages": [_message("user"), _message("assistant")]} for _ in range(200)])


def preferred(path: Path) -> None:
    """Make answers of which one is preferred."""
    asked = _message("user")
    names = ("chosen", "rejected")
    _rows(path, [{name: [asked, _message("assistant")] for name in names} for _ in range(200)])


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
    named = {f"{name[1:-1].lower()}_token": name for name in SPECIAL}
    found = PreTrainedTokenizerFast(tokenizer_object=made, **named)
    found.chat_template = CHAT
    return found


def _transformer(path: Path, kind: str, head: str, **sizes: int) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **sizes)
    getattr(transformers, f"AutoModelFor{head}").from_config(config).save_pretrained(path)
    if head == "ImageClassification":
        transformers.ViTImageProcessor().save_pretrained(path)
    else:
        _tokenizer().save_pretrained(path)


gpt2 = functools.partial(
    _transformer, kind="gpt2", head="CausalLM", vocab_size=500, n_embd=256, n_layer=4, n_head=4,
    n_positions=256,
)  # fmt: skip
llama = functools.partial(
    _transformer, kind="llama", head="CausalLM", vocab_size=500, hidden_size=256,
    intermediate_size=688, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    pad_token_id=1, eos_token_id=5,
)  # fmt: skip
bert = functools.partial(
    _transformer, kind="bert", head="SequenceClassification", vocab_size=500, hidden_size=256,
    num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024, pad_token_id=1,
)  # fmt: skip
vit = functools.partial(
    _transformer, kind="vit", head="ImageClassification", hidden_size=192, num_hidden_layers=4,
    num_attention_heads=3, intermediate_size=768,
)  # fmt: skip


def diffuser(path: Path) -> None:
    """Make a pipeline of Stable Diffusion, of few channels."""
    import diffusers
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    path.mkdir(parents=True, exist_ok=True)
    letters = [chr(number) for number in range(97, 123)]
    known = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (path / "vocab.json").write_text(json.dumps({name: at for at, name in enumerate(known)}))
    (path / "merges.txt").write_text("#version: 0.2\n")
    files = (str(path / name) for name in ("vocab.json", "merges.txt"))
    tokenizer = CLIPTokenizer(*files, model_max_length=77)
    down, up = ("DownBlock2D", "CrossAttnDownBlock2D"), ("CrossAttnUpBlock2D", "UpBlock2D")
    channels, size = (32, 64), 32
    encoder = CLIPTextConfig(
        vocab_size=len(known), hidden_size=size, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(
        block_out_channels=channels, down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2, latent_channels=4,
    )  # fmt: skip
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=channels, down_block_types=down, up_block_types=up,
        cross_attention_dim=size, sample_size=size,
    )  # fmt: skip
    diffusers.StableDiffusionPipeline(
        vae=vae, text_encoder=CLIPTextModel(encoder), tokenizer=tokenizer, unet=unet,
        scheduler=diffusers.DDPMScheduler(), safety_checker=None, feature_extractor=None,
    ).save_pretrained(path)  # fmt: skip


def enwik8(path: Path) -> None:
    """Make a compressed file of as many letters as the first 95 million of a Wikipedia."""
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(_sentence(200_000).encode() * 110)


def blender(path: Path) -> None:
    """Make pictures of an object from several sides, with the positions of the camera."""
    for part in ("train", "val", "test"):
        frames = []
        for number in range(16):
            _picture(path / part / f"{number}.png", (256, 256, 4))
            position = np.eye(4) + number / 10
            frames.append({"file_path": f"{part}/{number}", "transform_matrix": position.tolist()})
        table = {"camera_angle_x": 0.7, "frames": frames}
        (path / f"transforms_{part}.json").write_text(json.dumps(table))


def omniglot(path: Path) -> None:
    """Make 20 drawings of each of 1,623 letters."""
    np.save(path, np.random.randint(0, 2, (1623, 20, 1, 28, 28), dtype=np.uint8))


def voices(path: Path) -> None:
    """Make waves of two voices and their mixture, with tables of their files."""
    from scipy.io import wavfile

    path.mkdir(parents=True, exist_ok=True)
    for name in ("mix", "s1", "s2"):
        table = [(str(path / f"{name}_{number}.wav"), 34_000) for number in range(6)]
        for file, length in table:
            wavfile.write(file, 8000, np.random.randint(-9999, 9999, length, dtype=np.int16))
        (path / f"{name}.json").write_text(json.dumps(table))


def planetoid(path: Path) -> None:
    """Make Cora as PyTorch Geometric reads it: 2,708 papers, of which the last 1,000 are tests."""
    from scipy.sparse import csr_matrix

    path.mkdir(parents=True, exist_ok=True)
    features = csr_matrix(np.random.random((2708, 1433)) < 0.01, dtype=np.float32)
    labels = np.eye(7, dtype=np.int32)[np.arange(2708) % 7]
    cited = {paper: np.random.randint(0, 2708, 4).tolist() for paper in range(2708)}
    for name, part in (("", slice(140)), ("t", slice(1708, 2708)), ("all", slice(1708))):
        (path / f"ind.cora.{name}x").write_bytes(pickle.dumps(features[part]))
        (path / f"ind.cora.{name}y").write_bytes(pickle.dumps(labels[part]))
    (path / "ind.cora.graph").write_bytes(pickle.dumps(cited))
    (path / "ind.cora.test.index").write_text("\n".join(map(str, range(1708, 2708))))
