"""Objects, tensors and errors between ranks."""

import math
import os
import pickle
import threading
import time
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import distributed_utils
from distributed_utils import (
    BUCKET_BYTES,
    PACKED_BYTES,
    CannotSendError,
    Failure,
    LaunchEnvironmentError,
    PeerError,
    agree,
    all_gather_list,
    all_reduce_dict,
    answer_of_rank_0,
    broadcast_object,
    broadcast_tensors,
    gathering,
    launch_facts,
    stale_variables,
)
from tests.dist.harness import RanksFailed, run_ranks, run_ranks_to_any_end
from tests.test_checkpoint_file import rss_anon

# ----------------------------------------------------------------------------------------------------- broadcast_object


def odd_nest() -> dict:
    """One of each kind that a checkpoint may hold."""
    torch.manual_seed(0)
    matrix = torch.randn(6, 4)
    image = torch.randn(2, 3, 4, 5)
    base = torch.randn(1000)
    tied = torch.randn(5, 7)
    return {
        "plain": [None, True, 0, -(2**70), 1.5, math.inf, "ü\ud800", b"\x00\xff", (1, (2,)), {3, "x"}, frozenset([4])],
        "keys": {1: "int", "a": "text", (1, 2): "tuple", None: "none", 1.5: "float"},
        "known": (complex(1, -2), torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), OrderedDict(b=1, a=2)),
        "transposed": matrix.t(),
        "permuted": image.permute(3, 1, 0, 2),
        "channels_last": image.contiguous(memory_format=torch.channels_last),
        "strided": base[5:500:7],
        "column": matrix[:, 1],
        "expanded": torch.randn(1, 3).expand(4, 3),
        "expanded_twice": torch.randn(3, 1).expand(2, 3, 5),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "zero_dim": torch.tensor(3.25, dtype=torch.float64),
        "empty": torch.empty(0, 5),
        "empty_int": torch.empty(3, 0, dtype=torch.int64),
        "one_line": torch.randn(1, 4, 1),
        "bool": torch.tensor([True, False, True]),
        "bf16": torch.randn(5).bfloat16(),
        "half": torch.randn(5).half(),
        "float8": torch.randn(9).to(torch.float8_e4m3fn),
        "complex": torch.randn(2, 3, dtype=torch.complex128),
        "int8": torch.arange(-4, 4, dtype=torch.int8),
        "nan": torch.tensor([math.nan, -0.0, math.inf]),
        "parameter": torch.nn.Parameter(torch.randn(3)),
        "tied": [tied, tied, tied.t(), tied.view(-1)[7:14]],
        "parts": [base[:100], base[900:]],
        "mixed_views": [base[10:20], base.view(torch.uint8)[44:60]],
    }


def tensors_of(nest, path=""):
    if isinstance(nest, torch.Tensor):
        yield path, nest
    elif isinstance(nest, dict):
        for key, value in nest.items():
            yield from tensors_of(value, f"{path}.{key}")
    elif isinstance(nest, (list, tuple)):
        for index, value in enumerate(nest):
            yield from tensors_of(value, f"{path}.{index}")


def raw(tensor):
    flat = tensor.detach().resolve_conj().contiguous()
    return flat.as_strided((flat.numel(),), (1,)).view(torch.uint8)  # a lone element may have any stride


def without_tensors(nest):
    if isinstance(nest, torch.Tensor):
        return "tensor"
    if isinstance(nest, dict):
        return type(nest)((key, without_tensors(value)) for key, value in nest.items())
    if type(nest) in (list, tuple):
        return type(nest)(without_tensors(value) for value in nest)
    return nest


def exact(value):
    """Equality that tells True from 1 and a tuple from a list."""
    if isinstance(value, dict):
        return type(value), [(exact(key), exact(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), [exact(item) for item in value]
    return type(value), value


def check_odd_nest(src_rank):
    mine = odd_nest() if dist.get_rank() == src_rank else "ignored"
    got = broadcast_object(mine, src_rank)
    expected = odd_nest()
    assert exact(without_tensors(got)) == exact(without_tensors(expected))
    for (path, tensor), (_, wanted) in zip(tensors_of(got), tensors_of(expected), strict=True):
        assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape), path
        assert torch.equal(raw(tensor), raw(wanted)), path
        dense = path in (".transposed", ".permuted", ".channels_last", ".expanded", ".tied.2")
        assert not dense or tensor.stride() == wanted.stride(), path
    if dist.get_rank() != src_rank:
        assert not got["parameter"].requires_grad
    first, again, turned, part = got["tied"]
    first[1] = 7.0
    assert again is first and (turned[:, 1] == 7).all() and (part == 7).all()
    got["mixed_views"][0].zero_()
    assert (got["mixed_views"][1] == 0).all()
    assert got["strided"].untyped_storage().nbytes() <= 4000
    return True


@pytest.mark.parametrize("src_rank", [0, 2])
def test_every_kind_of_value_and_tensor_arrives_equal(src_rank):
    assert run_ranks(check_odd_nest, 3, src_rank) == [True] * 3


def test_the_check_of_arrival_can_fail():
    with pytest.raises(AssertionError):
        assert exact(without_tensors({"a": True})) == exact(without_tensors({"a": 1}))


# Plans of nests, which every rank builds alike: ("tensor", layout, dtype, shape, which memory).
plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8), st.binary(max_size=8)
)
tensor_plans = st.tuples(
    st.just("tensor"),
    st.sampled_from(["plain", "transposed", "channels_last", "strided", "expanded", "meta", "shared"]),
    st.sampled_from(
        [
            "float32",
            "bool",
            "bfloat16",
            "float8_e4m3fn",
            "float8_e5m2",
            "complex64",
            "complex128",
            "int64",
            "uint8",
            "float16",
        ]
    ),
    st.lists(st.integers(0, 6), max_size=4),
    st.integers(0, 2),
)
nest_plans = st.recursive(
    plain_values | tensor_plans | tensor_plans,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=4)
        | st.tuples(inner, inner)
    ),
    max_leaves=12,
)


def build(plan, bases):
    if isinstance(plan, dict):
        return {key: build(value, bases) for key, value in plan.items()}
    if not isinstance(plan, (list, tuple)):
        return plan
    if not (isinstance(plan, tuple) and plan and plan[0] == "tensor"):
        return type(plan)(build(value, bases) for value in plan)
    _, layout, dtype, shape, which = plan
    dtype = getattr(torch, dtype)
    if layout == "meta":
        return torch.empty(shape, dtype=dtype, device="meta")
    t = (torch.arange(math.prod(shape)).reshape(shape) * 7 + which).to(dtype)
    if layout == "transposed" and t.dim() > 1:
        t = t.transpose(0, -1)
    elif layout == "channels_last" and t.dim() == 4:
        t = t.contiguous(memory_format=torch.channels_last)
    elif layout == "strided" and t.dim():
        t = t[::2]
    elif layout == "expanded":
        t = t.unsqueeze(1).expand(t.shape[0], 3, *t.shape[1:]) if t.dim() else t.expand(4)
    elif layout == "shared":
        t = bases[which][which * 4 : which * 4 + 8 * len(shape)]
    return t


def send_nests(plans):
    group = dist.new_group([0, 2])
    for number, plan in enumerate(plans):
        src_rank, within = (number % 3, None) if number % 2 else (number // 2 % 2 * 2, group)
        if within is not None and dist.get_rank() == 1:
            continue
        bases = [torch.arange(64.0) + number for _ in range(3)]
        expected = build(plan, bases)
        got = broadcast_object(expected if dist.get_rank() == src_rank else None, src_rank, within)
        assert exact(without_tensors(got)) == exact(without_tensors(expected)), plan
        pairs = list(zip(tensors_of(got), tensors_of(expected), strict=True))
        for (path, tensor), (_, wanted) in pairs:
            assert (tensor.dtype, tensor.shape, tensor.device) == (wanted.dtype, wanted.shape, wanted.device), (
                plan,
                path,
            )
            assert wanted.is_meta or torch.equal(raw(tensor), raw(wanted)), (plan, path)
        if dist.get_rank() != src_rank:  # what shares memory there shares it here
            for base in bases:
                base.zero_()
                for (_, tensor), (_, wanted) in pairs:
                    if not wanted.is_meta and wanted.untyped_storage().data_ptr() == base.data_ptr():
                        tensor.zero_()
            for (path, tensor), (_, wanted) in pairs:
                assert wanted.is_meta or torch.equal(raw(tensor), raw(wanted)), (plan, path)
    return True


def test_any_nest_arrives_equal_from_any_rank_in_any_group():
    plans = []

    @settings(max_examples=100, phases=[Phase.generate], database=None, suppress_health_check=list(HealthCheck))
    @given(nest_plans)
    def draw(plan):
        plans.append(plan)

    draw()
    assert run_ranks(send_nests, 3, plans) == [True] * 3


def send_much_that_is_plain():
    """The most anonymous memory beside the object itself, on each rank."""
    value = (
        {"texts": [str(index) * 10 for index in range(200_000)], "raw": bytes(50 << 20)}
        if dist.get_rank() == 1
        else None
    )
    dist.barrier()
    before, seen, done = rss_anon(), [0], threading.Event()

    def watch():
        while not done.wait(0.001):
            seen[0] = max(seen[0], rss_anon())

    watcher = threading.Thread(target=watch)
    watcher.start()
    got = broadcast_object(value, 1)
    done.set()
    watcher.join()
    assert len(got["texts"]) == 200_000 and got["texts"][-1] == "199999" * 10 and got["raw"] == bytes(50 << 20)
    kept = 0 if dist.get_rank() == 1 else rss_anon() - before
    return max(0, seen[0] - before - kept)


def test_a_large_plain_object_costs_bounded_memory_beside_itself():
    assert max(run_ranks(send_much_that_is_plain, 2)) < 64 << 20


def send_over_2_gb():
    size, is_source = 2**31 + 12345, dist.get_rank() == 1
    got = broadcast_object(
        {"t": torch.arange(size // 4, dtype=torch.int32), "b": bytes(2**31 + 5)} if is_source else 0, 1
    )
    return got["t"].numel() == size // 4, got["t"][-1].item() == size // 4 - 1, len(got["b"]) == 2**31 + 5


@pytest.mark.slow
def test_more_than_2_gb_arrive_as_tensor_and_as_bytes():
    assert run_ranks(send_over_2_gb, 2, timeout=300) == [(True, True, True)] * 2


def send_without_broadcast():
    def broadcast(*_, **__):
        raise RuntimeError("Backend odd does not support broadcast")

    dist.broadcast = broadcast
    try:
        broadcast_object({"a": 1})
    except distributed_utils.CannotBroadcastError as error:
        return str(error)


def test_a_backend_that_cannot_broadcast_is_named_with_what_to_type():
    for message in run_ranks(send_without_broadcast, 2):
        assert "gloo" in message and "distributed_training.backend=auto" in message
        assert "checkpoint.load_checkpoint_on_all_dp_ranks=true" in message


def send_only_what_is_used():
    base = torch.zeros(2**20)
    got = broadcast_object({"strided": base[:: 2**18], "part": base[8:16]} if dist.get_rank() == 0 else None)
    return [tensor.untyped_storage().nbytes() for tensor in got.values()]


def test_a_view_of_a_large_base_does_not_bring_the_base():
    assert run_ranks(send_only_what_is_used, 2)[1] == [16, 32]


def send_in_buckets():
    sizes = [PACKED_BYTES, PACKED_BYTES + 1, 1, BUCKET_BYTES + 5, 0, 3] + [PACKED_BYTES // 2] * 80
    tensors = [torch.full((size,), index % 251, dtype=torch.uint8) for index, size in enumerate(sizes)]
    messages = []
    broadcast = dist.broadcast
    dist.broadcast = lambda tensor, *args, **kw: messages.append(tensor.nbytes) or broadcast(tensor, *args, **kw)
    got = broadcast_object(tensors if dist.get_rank() == 0 else None)
    assert all(torch.equal(one, wanted) for one, wanted in zip(got, tensors, strict=True))
    return messages


def test_no_message_is_larger_than_a_bucket_and_small_blocks_share_one():
    first, second = run_ranks(send_in_buckets, 2)
    assert first == second
    assert max(first) <= BUCKET_BYTES
    assert len(first) <= 8


def send_small():
    calls = []
    broadcast = dist.broadcast
    dist.broadcast = lambda *args, **kwargs: calls.append(1) or broadcast(*args, **kwargs)
    assert broadcast_object({"epoch": 3} if dist.get_rank() == 0 else None) == {"epoch": 3}
    return len(calls)


def test_a_small_plain_object_is_one_message():
    assert run_ranks(send_small, 2) == [1, 1]


def send_large_plain():
    value = {str(index): [index, "x" * 100] for index in range(2000)}
    return broadcast_object(value if dist.get_rank() == 0 else None) == value


def test_a_plain_object_may_be_larger_than_the_header():
    assert run_ranks(send_large_plain, 2) == [True, True]


class Own:
    pass


Pair = namedtuple("Pair", "a b")


def send_own_class():
    try:
        broadcast_object({"model": [1, {"bad": Own()}]} if dist.get_rank() == 0 else None)
    except (CannotSendError, PeerError) as error:
        return type(error).__name__, str(error)


def test_a_value_that_cannot_be_sent_is_an_error_on_all_ranks_with_its_path():
    (kind, message), (peer_kind, peer_message) = run_ranks(send_own_class, 2)
    assert (kind, peer_kind) == ("CannotSendError", "PeerError")
    for text in (message, peer_message):
        assert "obj['model'][1]['bad']" in text and "Own" in text


@pytest.mark.parametrize(
    "value",
    [Own(), Own, len, Pair(1, 2), SimpleNamespace(a=1), torch.randn(3).to_sparse()],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(CannotSendError, match=r"obj\['key'\]"):
        distributed_utils.objects._encode({"key": value})


def test_a_message_that_names_a_function_is_refused_unexecuted(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    with pytest.raises(pickle.UnpicklingError, match="only plain values"):
        distributed_utils.plain_values.loads(pickle.dumps(Evil()), distributed_utils.plain_values.refuse)
    assert not (tmp_path / "executed").exists()


def within_a_subgroup():
    group = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return None
    value = broadcast_object({"from": torch.tensor(dist.get_rank())} if dist.get_rank() == 2 else None, 2, group)
    tensor = torch.full((3,), dist.get_rank())
    broadcast_tensors([tensor], 2, group)
    gathered = all_gather_list(dist.get_rank(), group)
    total = all_reduce_dict({"n": dist.get_rank()}, group=group)
    try:
        agree(ValueError("mine") if dist.get_rank() == 2 else None, group)
    except (PeerError, ValueError) as error:
        return value["from"].item(), tensor.tolist(), gathered, total, getattr(error, "rank", "own")


def test_src_rank_is_a_global_rank_in_subgroups():
    results = run_ranks(within_a_subgroup, 3)
    assert results[1] == (2, [2, 2, 2], [1, 2], {"n": 3}, 2)
    assert results[2] == (2, [2, 2, 2], [1, 2], {"n": 3}, "own")


# ---------------------------------------------------------------------------------------------------- broadcast_tensors


def overwrite_in_place():
    rank = dist.get_rank()
    torch.manual_seed(rank)
    tensors = [
        torch.nn.Parameter(torch.randn(4, 5)),
        torch.randn(5, 4).t() if rank == 0 else torch.randn(4, 5),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        torch.tensor(rank + 0.5),
        torch.zeros(0),
        torch.tensor([rank == 1]),
        torch.randn(7).to(torch.float8_e5m2),
        torch.randn(PACKED_BYTES // 4 + 3),
        torch.randn(1200, 1200).t(),
    ]
    before = [tensor.data_ptr() for tensor in tensors]
    strides = [tensor.stride() for tensor in tensors]
    broadcast_tensors(tensors, src_rank=1)
    assert before == [tensor.data_ptr() for tensor in tensors]
    assert strides == [tensor.stride() for tensor in tensors]
    return [raw(tensor).numpy().tobytes() for tensor in tensors]


def test_tensors_are_overwritten_in_place_whatever_their_layout():
    first, second, third = run_ranks(overwrite_in_place, 3)
    assert first == second == third


# ------------------------------------------------------------------------------------- all_gather_list, all_reduce_dict


def gather():
    rank = dist.get_rank()
    return all_gather_list({"rank": rank, "text": "x" * (1000 * rank), "pair": (rank, None)}), all_gather_list(rank)


def test_every_rank_gets_all_data_in_order():
    for objects, ranks in run_ranks(gather, 3):
        assert [one["rank"] for one in objects] == ranks == [0, 1, 2]
        assert [len(one["text"]) for one in objects] == [0, 1000, 2000]
        assert objects[2]["pair"] == (2, None)


def ask_rank_0(most: int) -> list:
    """Values around the sizes at which another round is needed, from one rank or from all."""
    rank, asked = dist.get_rank(), []

    def answer(given: list) -> tuple:
        asked.append(given)
        return [len(one) for one in given], b"".join(given)

    answers = []
    for size in (0, 1, gathering.FRAME_BYTES - 40, gathering.FRAME_BYTES, 3 * gathering.REPLY_BYTES, most):
        for giver in (None, 2):
            mine = bytes([rank]) * (size if giver in (None, rank) else 3)
            answers.append(
                answer_of_rank_0(mine, answer)
                == ([len(one) for one in all_gather_list(mine)], b"".join(all_gather_list(mine)))
            )
    return [all(answers), len(asked)]


def test_rank_0_is_asked_by_all_and_answers_all_whatever_the_sizes():
    assert run_ranks(ask_rank_0, 3, 2 * gathering.PART_BYTES + 5) == [[True, 12], [True, 0], [True, 0]]


def gather_unsendable():
    try:
        all_gather_list([Own()] if dist.get_rank() == 1 else 1)
    except (CannotSendError, PeerError) as error:
        return type(error).__name__, getattr(error, "rank", None)


def ask_rank_0_unsendable():
    try:
        answer_of_rank_0([Own()] if dist.get_rank() == 1 else 1, sum)
    except (CannotSendError, PeerError) as error:
        return type(error).__name__, getattr(error, "rank", None)


def test_data_that_cannot_be_gathered_is_an_error_on_all_ranks():
    assert run_ranks(ask_rank_0_unsendable, 3) == [("PeerError", 1), ("CannotSendError", None), ("PeerError", 1)]
    assert run_ranks(gather_unsendable, 3) == [("PeerError", 1), ("CannotSendError", None), ("PeerError", 1)]


def reduce():
    rank = dist.get_rank()
    data = {"count": rank + 1, "loss": 0.1 * (rank + 1), "vector": torch.tensor([1.0, float(rank)]), "flag": rank == 1}
    if rank == 1:
        data = dict(reversed(data.items()))
    return all_reduce_dict(data)


def test_entries_are_summed_over_ranks_in_float64():
    for total in run_ranks(reduce, 3):
        assert total["count"] == 6 and type(total["count"]) is int
        assert total["loss"] == pytest.approx(0.6, rel=1e-15)
        assert total["flag"] == 1
        assert total["vector"].dtype == torch.float64 and total["vector"].tolist() == [3.0, 3.0]


def reduce_different_keys():
    all_reduce_dict({"a" if dist.get_rank() == 0 else "b": 1.0})


def test_different_entries_are_an_error():
    with pytest.raises(RanksFailed, match="different entries"):
        run_ranks(reduce_different_keys, 2)


# -------------------------------------------------------------------------------------------------- agreement on errors


class BadInput(ValueError):
    exit_status = 2


def disagree(failing):
    try:
        agree(BadInput("x" * 1000 + "end") if dist.get_rank() in failing else None)
    except (BadInput, PeerError) as error:
        return type(error).__name__, getattr(error, "rank", None), error.exit_status, "end" in str(error)
    return "fine"


def test_an_error_of_one_rank_is_raised_on_all():
    peer = ("PeerError", 1, 2, True)
    assert run_ranks(disagree, 3, (1,)) == [peer, ("BadInput", None, 2, True), peer]


def test_without_an_error_agreement_returns():
    assert run_ranks(disagree, 3, ()) == ["fine"] * 3


def test_with_several_errors_each_failing_rank_keeps_its_own():
    kinds = [one[:2] for one in run_ranks(disagree, 3, (1, 2))]
    assert kinds == [("PeerError", 1), ("BadInput", None), ("BadInput", None)]


# ------------------------------------------------------------------------------------------------ failures become known


def publish_at_once():
    dist.barrier()
    first = distributed_utils.publish_failure(KeyError(f"of {dist.get_rank()}"))
    dist.barrier()
    assert distributed_utils.peer_failure() == first
    return first


def test_the_first_published_failure_stays():
    failures = run_ranks(publish_at_once, 4)
    assert len(set(failures)) == 1
    assert failures[0].class_name == "KeyError" and failures[0].message == repr(f"of {failures[0].rank}")


def no_failure_yet():
    return distributed_utils.peer_failure()


def test_nothing_published_is_none():
    assert run_ranks(no_failure_yet, 2) == [None, None]


def hang_while_a_peer_fails():
    distributed_utils.PeerWatch(interval_s=0.1, grace_s=0.2)
    if dist.get_rank() == 1:
        distributed_utils.publish_failure(ValueError("gone wrong"))
        time.sleep(20)
    dist.barrier()


def test_the_watch_ends_a_rank_that_hangs_in_a_collective():
    begin = time.monotonic()
    outcomes = run_ranks_to_any_end(hang_while_a_peer_fails, 3, peers_may_finish=1.0)
    assert time.monotonic() - begin < 10
    assert [outcomes[rank].exitcode for rank in (0, 2)] == [1, 1]
    assert outcomes[1].hung  # the rank that failed is not ended by its own failure


def watch_and_stop():
    watch = distributed_utils.PeerWatch()
    for _ in range(50):  # the watch uses the store at the same time, by a connection of its own
        all_gather_list(1)
        distributed_utils.peer_failure()
    begin = time.monotonic()
    watch.leaving()
    watch.stop()
    return time.monotonic() - begin


def test_the_watch_does_not_delay_an_orderly_end():
    assert max(run_ranks(watch_and_stop, 2)) < 0.9


# ---------------------------------------------------------------------------------------------- without a process group


def test_without_a_process_group_everything_works_as_one_rank():
    nest = {"a": torch.ones(2).t(), "b": Own()}
    assert broadcast_object(nest) is nest
    broadcast_tensors([torch.ones(2)])
    assert all_gather_list(nest) == [nest]
    assert all_reduce_dict({"n": 2, "x": 0.5}) == {"n": 2, "x": 0.5}
    agree(None)
    with pytest.raises(KeyError):
        agree(KeyError("own"))
    distributed_utils.barrier()
    assert (distributed_utils.get_rank(), distributed_utils.get_world_size()) == (0, 1)
    assert distributed_utils.is_master() and distributed_utils.get_local_world_size() == 1
    assert distributed_utils.peer_failure() is None
    assert distributed_utils.publish_failure(KeyError("x")) == Failure(0, "KeyError", "'x'")


# ------------------------------------------------------------------------------------------------ variables of a launch

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_ID": "77",
    "SLURM_TASK_PID": "4242",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4",
}


def test_the_variables_of_torchrun_place_this_process():
    facts = launch_facts(TORCHRUN)
    assert (facts.rank, facts.world_size, facts.local_rank, facts.local_world_size) == (3, 4, 1, 2)
    assert (facts.master_addr, facts.master_port) == ("node0", 29500)
    assert facts.store_is_agents and facts.started_by_agent


@pytest.mark.parametrize(
    "left_over",
    [
        {},
        {"RANK": "3"},
        {"WORLD_SIZE": "8"},
        {"MASTER_ADDR": "node7", "MASTER_PORT": "1234"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
        {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7", "SLURM_LOCALID": "1"},
        SRUN,
    ],
    ids=lambda env: ",".join(env) or "none",
)
def test_a_part_of_another_launch_is_none(left_over):
    assert launch_facts(left_over, ancestors=[1000, 999]) is None
    assert stale_variables(left_over) == [name for name in left_over if not name.startswith("SLURM")]


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "4"},
        {"RANK": "-1"},
        {"WORLD_SIZE": "two"},
        {"LOCAL_RANK": "2"},
        {"LOCAL_RANK": None},
        {"LOCAL_WORLD_SIZE": "5"},
        {"MASTER_PORT": "70000"},
        {"MASTER_ADDR": None},
        {"RANK": None},
        {"RANK": "0"},
    ],
    ids=str,
)
def test_contradictory_variables_are_an_error_that_prints_them(change):
    env = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(LaunchEnvironmentError) as caught:
        launch_facts(env)
    for name in distributed_utils.LAUNCH_VARIABLES:
        assert name not in env or f"{name}={env[name]}" in str(caught.value)
    assert caught.value.exit_status == 2


def test_srun_places_this_process_only_if_it_started_it():
    facts = launch_facts(SRUN, ancestors=[5000, 4242, 1])
    assert (facts.rank, facts.world_size, facts.local_rank, facts.local_world_size) == (3, 4, 1, 2)
    assert facts.master_addr == "gpu03"
    assert not facts.started_by_agent and not facts.store_is_agents
    batch_script = {**SRUN, "SLURM_STEP_ID": str(0xFFFFFFFB)}
    assert launch_facts(batch_script, ancestors=[5000, 4242, 1]) is None


@pytest.mark.parametrize(
    "nodelist, first",
    [("gpu[03-05,9]-ib,other", "gpu03-ib"), ("one", "one"), ("a1,a2", "a1"), ("n[7]", "n7")],
)
def test_the_first_host_of_a_node_list(nodelist, first):
    assert distributed_utils.launcher._first_host(nodelist) == first


def test_an_agent_that_does_not_answer_is_an_error_in_seconds():
    facts = launch_facts({**TORCHRUN, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
    begin = time.monotonic()
    with pytest.raises(LaunchEnvironmentError, match="nobody answers"):
        distributed_utils.init_process_group(facts=facts)
    assert time.monotonic() - begin < 10
    assert not dist.is_initialized()


def join_by_ourselves():
    distributed_utils.init_process_group()
    assert dist.is_initialized() and dist.get_backend() == "gloo"
    return distributed_utils.get_rank(), distributed_utils.get_world_size(), distributed_utils.get_local_world_size()


def test_ranks_join_by_the_variables_of_their_launch():
    assert run_ranks(join_by_ourselves, 3, init=False) == [(0, 3, 3), (1, 3, 3), (2, 3, 3)]


def wait_for_one_that_does_not_come():
    if dist.is_initialized() or os.environ["RANK"] == "1":
        time.sleep(3)
        return
    cfg = distributed_utils.DistributedTrainingConfig(timeout_s=0.5)
    try:
        distributed_utils.init_process_group(cfg)
    except TimeoutError as error:
        return str(error)


def test_a_rank_that_does_not_come_is_named():
    message = run_ranks(wait_for_one_that_does_not_come, 3, init=False)[0]
    assert "missing: 1" in message


def stopped_while_gathering(late):
    rank = int(os.environ["RANK"])
    if rank == 1:
        time.sleep(late)
    try:
        facts, cfg = launch_facts(), distributed_utils.DistributedTrainingConfig()
        store = distributed_utils.gather_ranks(cfg, facts, lambda: "SIGTERM" if rank == 0 else None)
        distributed_utils.init_process_group(cfg, facts=facts, store=store)
    except (distributed_utils.StoppedAtStartError, distributed_utils.PeerError) as error:
        return error.exit_status, type(error).__name__
    return dist.is_initialized()


@pytest.mark.parametrize("late", [0.0, 1.0])
def test_a_stop_request_while_the_ranks_gather_is_obeyed_by_all_or_none(late):
    ends = run_ranks(stopped_while_gathering, 3, late, init=False)
    if late or ends != [True] * 3:  # one rank has the error, the others know of it
        assert sorted(ends) == [(75, "PeerError"), (75, "PeerError"), (75, "StoppedAtStartError")]


def test_impossible_settings_are_named_with_their_override():
    cfg = distributed_utils.DistributedTrainingConfig(distributed_world_size=0, timeout_s=0)
    problems = cfg.problems()
    assert len(problems) == 2
    assert all("distributed_training." in problem and "=" in problem for problem in problems)
    assert distributed_utils.DistributedTrainingConfig().problems() == []


@pytest.mark.parametrize("backend, missing", [("foo", "foo"), ("cpu:gloo,cuda:foo", "foo"), ("", ""), ("undefined", "undefined")])
def test_a_backend_that_torch_does_not_have_is_refused_before_anything_starts(backend, missing):
    problems = distributed_utils.DistributedTrainingConfig(backend=backend).problems()
    assert len(problems) == 1 and f"has no backend {missing!r}, it has" in problems[0] and "gloo" in problems[0]
    assert problems[0].endswith("distributed_training.backend=auto")


@pytest.mark.parametrize("backend", ["auto", "gloo", "cpu:gloo", "GLOO", "cpu:gloo,cuda:nccl", "nccl"])
def test_a_backend_that_torch_has_is_taken(backend):
    has_all = "nccl" not in backend or torch.distributed.is_nccl_available()
    assert (distributed_utils.DistributedTrainingConfig(backend=backend).problems() == []) == has_all
