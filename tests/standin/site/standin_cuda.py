"""torch.cuda over the stand-in, as far as the course asks, and "nccl" over gloo."""

import logging
import os
import time
import types
from contextlib import nullcontext

import _standin
import torch
import torch.distributed.constants as constants
import torch.distributed.distributed_c10d as c10d

GPUS = int(os.environ["STANDIN_GPUS"])
BYTES = int(os.environ.get("STANDIN_BYTES", 80 << 30))
CAPABILITY = tuple(map(int, os.environ.get("STANDIN_CAPABILITY", "9.0").split(".")))


def index(device=None):
    if isinstance(device, int) or device is None:
        return _standin.device() if device is None or device < 0 else device
    number = torch.device(device).index
    return _standin.device() if number is None else number


class Event:
    def __init__(self, enable_timing=False, **options):
        self.seconds = 0.0

    def record(self, stream=None):
        self.seconds = time.perf_counter()

    def elapsed_time(self, end):
        return 1000 * (end.seconds - self.seconds)

    def query(self):
        return True

    def synchronize(self):
        pass

    wait = record


class Stream:
    """Everything has happened when it is asked for."""

    cuda_stream = stream_id = 0
    device_type = 1

    def __init__(self, device=None, **options):
        self.device_index = index(device)
        self.device = torch.device("cuda", self.device_index)

    def synchronize(self, *others):
        pass

    wait_stream = wait_event = synchronize

    def record_event(self, event=None):
        event = event or Event()
        event.record()
        return event

    def query(self):
        return True


class Device:
    def __init__(self, device):
        self.number = index(device)

    def __enter__(self):
        self.before = collective(self.number)

    def __exit__(self, *error):
        _standin.set_device(self.before)


def collective(number):
    before = _standin.device()
    if number >= 0:
        _standin.set_device(number)
    return before


def stats(device=None):
    found = {"requested": _standin.asked, **dict.fromkeys(("allocated", "active", "reserved"), _standin.held)}
    now = {f"{kind}_bytes.all.current": of(index(device)) for kind, of in found.items()}
    peaks = {f"{kind}_bytes.all.peak": _standin.peak(index(device)) for kind in ("allocated", "active", "reserved")}
    return {**now, **peaks, "num_ooms": 0}


def peak(device=None):
    return _standin.peak(index(device))


def held(device=None):
    return _standin.held(index(device))


def snapshot():
    """What lives, and what came and went since it is recorded; moments and callers are not known."""
    living = ("address", "requested_size", "size")
    changes = [
        [
            {"action": "alloc" if made else "free_completed", "addr": at, "size": size, "time_us": 0, "frames": []}
            for made, at, size in _standin.events(number)
        ]
        for number in range(GPUS)
    ]
    blocks = [dict(zip(living, block), state="active_allocated") for n in range(GPUS) for block in _standin.blocks(n)]
    return {"segments": [{"blocks": blocks}], "device_traces": changes}


def generator(device="cuda"):
    return _standin.generator(index(device))


def every(do):
    for number in range(GPUS):
        do(_standin.generator(number))


PROPERTIES = types.SimpleNamespace(
    name="Stand-in GPU",
    total_memory=BYTES,
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=132,
    L2_cache_size=50 << 20,
    gcnArchName="",
)
OF_CUDA = {
    "is_available": lambda: True,
    "device_count": lambda: GPUS,
    "current_device": _standin.device,
    "set_device": lambda device: _standin.set_device(index(device)),
    "device": Device,
    "_DeviceGuard": Device,
    "device_of": lambda tensor: Device(tensor.device),
    "_exchange_device": collective,
    "_maybe_exchange_device": collective,
    "synchronize": lambda device=None: None,
    "_lazy_init": lambda: None,
    "init": lambda: None,
    "is_initialized": lambda: True,
    "_is_in_bad_fork": lambda: False,
    "_is_compiled": lambda: True,
    "memory_stats": stats,
    "memory_allocated": held,
    "memory_reserved": held,
    "max_memory_allocated": peak,
    "max_memory_reserved": peak,
    "reset_peak_memory_stats": lambda device=None: _standin.reset_peak(index(device)),
    "memory_snapshot": lambda: snapshot()["segments"],
    "_snapshot": snapshot,
    "_record_memory_history": lambda enabled="all", **options: _standin.record(enabled is not None),
    "_set_allocator_settings": lambda settings: None,
    "empty_cache": lambda: None,
    "set_per_process_memory_fraction": lambda share, device=None: _standin.allow(index(device), round(share * BYTES)),
    "mem_get_info": lambda device=None: (BYTES - held(device), BYTES),
    "get_device_properties": lambda device=None: PROPERTIES,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_capability": lambda device=None: CAPABILITY,
    "is_bf16_supported": lambda including_emulation=True: True,
    "Event": Event,
    "Stream": Stream,
    "current_stream": Stream,
    "default_stream": Stream,
    "set_stream": lambda stream: None,
    "stream": nullcontext,
    "StreamContext": nullcontext,
    "is_current_stream_capturing": lambda: False,
    "default_generators": tuple(_standin.generator(number) for number in range(GPUS)),
    "manual_seed": lambda seed: generator().manual_seed(int(seed)) and None,
    "manual_seed_all": lambda seed: every(lambda one: one.manual_seed(int(seed))),
    "seed_all": lambda: every(lambda one: one.seed()),
    "initial_seed": lambda: generator().initial_seed(),
    "get_rng_state": lambda device="cuda": generator(device).get_state(),
    "set_rng_state": lambda state, device="cuda": generator(device).set_state(state) and None,
    "get_rng_state_all": lambda: [_standin.generator(number).get_state() for number in range(GPUS)],
    "set_rng_state_all": lambda states: (
        [_standin.generator(n).set_state(state) for n, state in enumerate(states)] and None
    ),
}
for name, value in OF_CUDA.items():
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random):
        if module is torch.cuda or hasattr(module, name):
            setattr(module, name, value)
logging.getLogger("torch.utils.flop_counter").setLevel(
    logging.ERROR
)  # it misses triton, which comes with CUDA's builds
torch.version.cuda = "13.0"
torch.backends.cuda.is_built = lambda: True
torch._C._cuda_getDeviceCount = lambda: GPUS
torch._C._cuda_getDevice = _standin.device
torch._C._cuda_getCurrentStream = lambda number: (0, number, 1)
torch._C._cuda_getCurrentRawStream = lambda number: 0
torch._C._cuda_clearCublasWorkspaces = lambda: None
torch._C._cuda_isCurrentStreamCapturing = lambda: False
torch._C._nccl_version = lambda: (2 << 32) | (27 << 16) | 5
torch._C._nccl_version_suffix = lambda: b""
for name in ("_cuda_CUDAAllocator", "_cuda_CUDAAllocator_AllocatorState"):  # only named in types
    if not hasattr(torch._C, name):
        setattr(torch._C, name, type(name, (), {}))

_resize = torch.UntypedStorage.resize_


def resize_(storage, size):
    if storage.device.type != "cuda":
        return _resize(storage, size)
    _standin.resize(storage, int(size))
    return storage


def to_gpu(storage, device=None, non_blocking=False):
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=device or "cuda").untyped_storage().copy_(storage)


torch.UntypedStorage.resize_, torch.UntypedStorage.cuda = resize_, to_gpu
torch.Tensor.record_stream = lambda tensor, stream: None  # all runs in order


class _Kind(type):
    def __instancecheck__(cls, one):
        return isinstance(one, _standin.Nccl)


class ProcessGroupNCCL(metaclass=_Kind):
    """Made as NCCL's is; what comes out is gloo that takes tensors of the stand-in only."""

    class Options(torch._C._distributed_c10d.Backend.Options):
        is_high_priority_stream = False

        def __init__(self, *arguments, **options):
            super().__init__("nccl")

        def __deepcopy__(self, memo):
            return self

    def __new__(cls, store, rank, size, options=None, timeout=None):
        if text := os.environ.get("STANDIN_NCCL_FAILS"):
            only = os.environ.get("STANDIN_NCCL_FAILS_ON")
            if only is None or int(only) == rank:
                raise torch.distributed.DistBackendError(text)
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        wait = timeout or getattr(options, "_timeout", None) or c10d.default_pg_timeout
        return _standin.Nccl(rank, size, c10d.ProcessGroupGloo(store, rank, size, timeout=wait))


for module in (c10d, torch._C._distributed_c10d, torch.distributed):
    module.ProcessGroupNCCL = ProcessGroupNCCL
constants.default_pg_nccl_timeout = c10d.default_pg_nccl_timeout = c10d.default_pg_timeout
c10d._NCCL_AVAILABLE = True
c10d.is_nccl_available = torch.distributed.is_nccl_available = lambda: True


def split_group(parent_pg=None, split_ranks=None, timeout=None, pg_options=None, group_desc=None, backend=None):
    """NCCL parts a communicator; here each part is a group of its own."""
    groups = [(ranks, c10d.new_group(ranks, timeout=timeout, group_desc=group_desc)) for ranks in split_ranks]
    return next((group for ranks, group in groups if c10d.get_rank() in ranks), None)


for module in (c10d, torch.distributed, torch.distributed.device_mesh):
    module.split_group = split_group
