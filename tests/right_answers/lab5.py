"""Right answers to lab 5: freed outputs, numbers of numpy."""

import numpy as np

from tests.right_answers.register import right


@right("5.3")
def free_output_by_one_element(output):
    output.data = output.data.new_empty(1).expand(output.shape)


@right("5.4")
def how_many_fit_by_numpy(budget_bytes, in_flight, full_bytes, recomputed_bytes):
    left = np.int64(budget_bytes) - in_flight * recomputed_bytes
    most = left // (full_bytes - recomputed_bytes) if full_bytes > recomputed_bytes else in_flight
    return np.where(left < 0, -1, np.minimum(most, in_flight))[()]
