# a tiny tokenizer and text files, offline
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    GPT2Config,
    LlamaConfig,
    BertConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)
import random, json

random.seed(0)
words = "the king and queen of lords shall speak now to thee my liege with sword in hand upon this night".split()
lines = [" ".join(random.choice(words) for _ in range(30)) for _ in range(800)]
open("train.txt", "w").write("\n".join(lines))
open("valid.txt", "w").write("\n".join(lines[:100]))
json.dump([{"text": l, "label": i % 2} for i, l in enumerate(lines)], open("train.json", "w"))
t = Tokenizer(models.BPE(unk_token="[UNK]"))
t.pre_tokenizer = pre_tokenizers.Whitespace()
t.train_from_iterator(
    lines,
    trainers.BpeTrainer(
        vocab_size=500, special_tokens=["[UNK]", "[PAD]", "[CLS]", "[SEP]", "[EOS]"]
    ),
)
f = PreTrainedTokenizerFast(
    tokenizer_object=t,
    unk_token="[UNK]",
    pad_token="[PAD]",
    cls_token="[CLS]",
    sep_token="[SEP]",
    eos_token="[EOS]",
)
for name, cfg, cls in (
    (
        "gpt2",
        GPT2Config(vocab_size=500, n_embd=256, n_layer=4, n_head=4, n_positions=256),
        AutoModelForCausalLM,
    ),
    (
        "llama",
        LlamaConfig(
            vocab_size=500,
            hidden_size=256,
            intermediate_size=688,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        ),
        AutoModelForCausalLM,
    ),
    (
        "bert",
        BertConfig(
            vocab_size=500,
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=1024,
        ),
        AutoModelForSequenceClassification,
    ),
):
    cls.from_config(cfg).save_pretrained(name)
    f.save_pretrained(name)
