"""``actmem plan``: which layouts (TP, PP, DP, …) of a training job fit, what each holds (its bill), and its time.

Begin with ``search.Request``.  Everything here is predicted, without torch.
"""
