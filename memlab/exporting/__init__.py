"""A step as a file that a person can run without memlab.

In: a workload, a config, and the library that is to run the training loop. Out: the text of a
Python file. Start with `export.py`. `own_source.py` finds the source of a person's functions and
classes, `values.py` writes values as Python, and `definitions.py` puts both at the top level of
one file. `finetuned_text.py` writes the model of a fine-tuning. `whole_file.py` adds the loop in
plain PyTorch; `with_lightning.py`, `with_transformers.py` and `with_accelerate.py` add those of the
libraries, and `rank_parts.py` what several ranks need.
"""
