"""Jobs: each once, here or in other processes, with an error that comes through."""

import os

import pytest

from actmem_course.bench.reproduce.jobs import Job, run_jobs


@pytest.mark.parametrize("processes", [1, 2])
def test_each_job_runs_once(processes):
    jobs = [Job(divmod, (7, i)) for i in (1, 2, 3, 4, 2, 5, 6, 7, 8)]
    done = []
    results, usage = run_jobs(jobs, processes, done.append)
    assert results == {job: job.function(*job.arguments) for job in jobs}
    assert sorted(job.arguments for job in done) == sorted({job.arguments for job in jobs})
    assert usage.processes == processes and usage.seconds > 0 and usage.peak_bytes > 2**20


def test_other_processes_do_the_work():
    here, _ = run_jobs([Job(os.getpid, ())])
    assert set(here.values()) == {os.getpid()}
    jobs = [Job(os.getpid, (), label=str(i)) for i in range(8)]
    elsewhere, _ = run_jobs(jobs, 2)
    assert os.getpid() not in elsewhere.values()


def test_a_few_jobs_are_not_worth_a_process():
    results, usage = run_jobs([Job(os.getpid, (), label=str(i)) for i in range(7)], 4)
    assert set(results.values()) == {os.getpid()} and usage.processes == 1


@pytest.mark.parametrize("processes", [1, 2])
def test_an_error_comes_through(processes):
    jobs = [Job(divmod, (7, i)) for i in range(8)]
    with pytest.raises(ZeroDivisionError):
        run_jobs(jobs, processes)


def test_nothing_to_do():
    results, usage = run_jobs([], 4)
    assert results == {} and usage.processes == 1
