"""Devices of this machine, and cards that need not be in it.

- `here.py`: the CPU and the accelerator of this machine, their names and free memory.
- `card.py`: what there is to know of a card; `card_table.py`: what each known card holds and how
  fast it can be, with the sources.
- `cluster.py`: several cards and the links between them; `cluster_table.py`: the links that go with
  each card, with the sources.
- `cards.py` finds a card or a cluster; `resolve` turns what a person typed ("cpu", "rtx-4060",
  "24GiB", "8x-h100") into a `Target` to predict for.
- `load.py`: what other programs use of this machine meanwhile.
- `generators.py`: the random numbers of a device, and autocast: noted and put back.

To add a card, add a line to the table in `card_table.py`.
"""
