from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

data = load_dataset("json", data_files="train.json")["train"].remove_columns("label")
t = SFTTrainer(
    "llama",
    args=SFTConfig(
        "out",
        per_device_train_batch_size=4,
        max_length=128,
        num_train_epochs=1,
        report_to=[],
        gradient_checkpointing=True,
        bf16=True,
        packing=False,
    ),
    train_dataset=data,
    peft_config=LoraConfig(r=8, target_modules="all-linear"),
)
t.train()
t.save_model("final")
