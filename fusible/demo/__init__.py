"""`python -m fusible demo`: one small language model, trained twice, with plain `torch.nn` and with fusible.

`model.py` is the part to read: the same block written both ways. `train.py` trains, `worker.py` gives each variant a
process of its own and measures it there, `report.py` and `picture.py` show the result, `main.py` ties them together.
"""
