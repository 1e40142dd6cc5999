"""Where the paper disagrees with itself, and what larger microbatches pay for."""

from actmem_course.others.disagreements import disagreements


def numbers(where, text):
    (found,) = [d for d in disagreements() if d.where == where and text in d.printed]
    return [round(float(value.value), 2) for value in found.ours]


def test_every_number():
    assert numbers("§4.3", "under 0.01%") == [0.57]
    assert numbers("§4.3", "175B 8, 530B 35") == [16, 70]
    assert numbers("§6.1, figure 7", "under 20%") == [16.14, 18.48, 20.24, 20.24]
    assert numbers("§6.1, figure 7", "full recomputation needs 10%") == [7.59, 8.7, 9.52, 9.52]
    assert numbers("§5 and eq. 8", "175B +2.7%, 530B +1.6%") == [0.9, 0.45, 0.55, 0.27]
    assert numbers("Table 5, HFU", "22B 43.7%") == [42.37, 51.85, 56.35, 56.51]
    assert numbers("§5", "+33.3%") == [22.81, 22.52, 22.4, 22.37]
    assert numbers("Appendix B, figure 9", "2.73 GB") == [2.73, 2.94, 0.34]
    assert numbers("Appendix B, figure 9", "r = p = 35") == [139, 10.86]
    assert numbers("Appendix C and table 5", "175B MFU 52.3% (+0.7)") == [51.6]
    assert len(disagreements()) == 10
