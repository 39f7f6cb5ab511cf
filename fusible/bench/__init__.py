"""`python -m fusible bench`: blocks against plain PyTorch, eager and compiled, on this machine.

`rows` is the table of workloads with their targets, `blocks` builds them, `worker` runs one variant in a process of its
own, where `load` says what is timed, `measure` lets the processes take turns, `results` holds what came out, `report`
and `chart` show it.
"""
