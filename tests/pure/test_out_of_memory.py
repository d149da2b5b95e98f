"""What an out-of-memory message says: the numbers of each form, and the verdicts they decide."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import memlab
from memlab._util.units import GIB
from memlab.cli import commands
from memlab.errors import MemlabError
from memlab.integrations.out_of_memory import _size
from tests.snapshot_parts import dump, fragmented, training
from tests.store_parts import a_result

UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def printed(size, units=UNITS):
    """Return a size as c10's `format_size` prints it."""
    for unit, factor in units.items():
        if size > factor:
            return f"{size / factor:.2f} {unit}"
    return f"{size} bytes"


def modern(asked, capacity, free, process, allocated, unallocated, more=""):
    """Return the message of torch 2.3 and later."""
    own = f"Including non-PyTorch memory, this process has {process} memory in use. "
    return (
        f"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total "
        f"capacity of {capacity} of which {free} is free. {more}{own if process else ''}Of the "
        f"allocated memory {allocated} is allocated by PyTorch, and {unallocated} is reserved by "
        "PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid fragmentation."
    )


def pooled(asked, capacity, free, process, allocated, unallocated):
    return modern(asked, capacity, free, process, allocated, unallocated).replace(
        "by PyTorch, and", "by PyTorch, with 22.00 MiB allocated in private pools (e.g., CUDA "
        "Graphs), and",
    )  # fmt: skip


def misspelt(*sizes):
    """Return the message of torch 2.1 and 2.2."""
    return modern(*sizes).replace("capacity", "capacty").replace("torch.Out", "torch.cuda.Out")


def old(asked, capacity, free, process, allocated, unallocated):
    return (
        f"RuntimeError: CUDA out of memory. Tried to allocate {asked} (GPU 0; {capacity} total "
        f"capacity; {allocated} already allocated; {free} free; {unallocated} cached)"
    )


def xpu(*sizes):
    return modern(*sizes[:3], "", *sizes[4:]).replace("CUDA out", "XPU out")


def hip(*sizes):
    return modern(*sizes).replace("CUDA out", "HIP out")


NAMES = ("requested", "capacity", "free", "process", "allocated", "unallocated")
SIZES = st.integers(1, 2**40)


@pytest.mark.parametrize("form", [modern, pooled, misspelt, old, xpu, hip])
@given(st.tuples(*[SIZES] * 6), st.sampled_from(["", "[rank3]: ", "2024-01-02 ERROR "]))
@settings(max_examples=40, deadline=None)
def test_numbers_are_read_back_from_every_form(form, sizes, prefix):
    texts = [printed(size) for size in sizes]
    numbers = memlab.explain_error(prefix + form(*texts)).numbers
    for name, size, text in zip(NAMES, sizes, texts, strict=True):
        if form in (old, xpu) and name == "process":
            continue
        unit = UNITS.get(text.split()[1], 1)
        assert abs(numbers[f"{name}_bytes"] - size) <= 0.011 * unit, name


@given(SIZES)
@settings(deadline=None)
def test_a_printed_size_stands_for_a_range_that_holds_it(size):
    low, high = _size(*printed(size).split())
    assert low <= size <= high


@given(st.tuples(*[SIZES] * 3))
@settings(max_examples=40, deadline=None)
def test_the_gigabytes_of_apple_are_binary(sizes):
    texts = [printed(size).replace("iB", "B") for size in sizes]
    numbers = memlab.explain_error(
        f"RuntimeError: MPS backend out of memory (MPS allocated: {texts[0]}, other allocations: "
        f"1.00 MB, max allowed: {texts[1]}). Tried to allocate {texts[2]} on private pool."
    ).numbers
    for name, size, text in zip(("allocated", "allowed", "requested"), sizes, texts, strict=True):
        unit = UNITS.get(text.split()[1].replace("B", "iB"), 1)
        assert abs(numbers[f"{name}_bytes"] - size) <= 0.011 * unit


@given(st.text(max_size=300) | st.binary(max_size=300).map(lambda b: b.decode("latin-1")))
@settings(deadline=None)
def test_any_text_has_an_answer(text):
    if text.strip():
        found = memlab.explain_error(text)
        assert json.loads(json.dumps(found.to_dict())) == found.to_dict()
        assert str(found)


def verdicts(message, **more):
    return {str(each.name): str(each.verdict)
            for each in memlab.explain_error(message, **more).causes}  # fmt: skip


def test_a_full_card_is_a_step_that_is_too_large():
    found = verdicts(
        modern("256.00 MiB", "23.69 GiB", "100.00 MiB", "23.50 GiB", "22.80 GiB", "120.00 MiB")
    )
    assert found["too large a step"] == "likely"
    assert found["fragmentation"] == "excluded"
    assert found["another process"] == "excluded"
    assert found["a leak"] == "unknown"


@pytest.mark.parametrize(
    ("allocated", "unallocated", "verdict"),
    [
        ("12.00 GiB", "10.50 GiB", "likely"),
        ("20.80 GiB", "1.70 GiB", "possible"),
        ("21.10 GiB", "1.40 GiB", "excluded"),
    ],
)
def test_fragmentation_needs_enough_unallocated(allocated, unallocated, verdict):
    text = modern("2.00 GiB", "23.69 GiB", "0.50 GiB", "23.10 GiB", allocated, unallocated)
    assert verdicts(text)["fragmentation"] == verdict


def test_what_others_hold_is_what_is_neither_free_nor_own():
    found = verdicts(modern("2.00 GiB", "23.69 GiB", "0.50 GiB", "3.10 GiB", "2.00 GiB", "0.20 GiB",
                            "Process 7 has 20.00 GiB memory in use. "))  # fmt: skip
    assert found["another process"] == "likely"
    assert found["too large a step"] == "possible"


def test_in_a_container_the_process_itself_is_listed_as_another():
    found = verdicts(modern("158.00 MiB", "23.69 GiB", "115.69 MiB", "", "22.14 GiB", "910.35 MiB",
                            "Process 21422 has 23.57 GiB memory in use. "))  # fmt: skip
    assert found["another process"] == "excluded"


def test_one_request_may_be_more_than_the_card():
    found = verdicts(
        modern("189.06 GiB", "47.27 GiB", "29.71 GiB", "17.55 GiB", "17.08 GiB", "279.90 MiB")
    )
    assert found["one tensor larger than the card"] == "likely"


def test_no_one_else_is_the_cause_of_a_request_larger_than_the_card():
    for form in (old, modern):
        found = verdicts(form("189.06 GiB", "47.27 GiB", "9.71 GiB", "7.55 GiB", "7.08 GiB",
                              "279.90 MiB"))  # fmt: skip
        assert found["another process"] == found["a library's workspace"] == "excluded"


def test_a_request_smaller_than_what_was_free_is_no_library():
    found = verdicts(xpu("4.00 GiB", "15.11 GiB", "15.11 GiB", "", "1024 bytes", "2.00 MiB"))
    assert found["a library's workspace"] == found["fragmentation"] == "excluded"
    assert found["a limit on the process"] == "possible"


@pytest.mark.parametrize(("form", "verdict"), [(hip, "unknown"), (xpu, "unknown"),
                                               (modern, "excluded")])  # fmt: skip
def test_a_driver_may_offer_less_than_a_card_has_where_it_shares_the_host_memory(form, verdict):
    text = form("16.00 GiB", "15.24 GiB", "15.09 GiB", "", "0 bytes", "0 bytes")
    assert verdicts(text)["a limit on the process"] == verdict


def test_a_message_without_its_beginning_is_read():
    whole = old("216.00 MiB", "7.92 GiB", "24.56 MiB", "", "69.17 MiB", "17.00 MiB")
    part = whole[whole.index("Tried") :]
    assert memlab.explain_error(part).numbers == memlab.explain_error(whole).numbers
    assert verdicts(part) == verdicts(whole)


def test_a_limit_is_named_by_the_message():
    sizes = ("2.00 GiB", "23.69 GiB", "20.00 GiB", "3.00 GiB", "2.00 GiB", "0.20 GiB")
    assert verdicts(modern(*sizes, "4.00 GiB allowed; "))["a limit on the process"] == "likely"


def test_numbers_that_contradict_one_another_are_said():
    found = memlab.explain_error(
        modern("2.00 GiB", "8.00 GiB", "4.00 GiB", "3.00 GiB", "20.00 GiB", "0.20 GiB")
    )
    assert "contradict" in found.notes[0]
    assert found.of_verdict("likely") == ()


def test_the_first_error_of_several_ranks_counts():
    first = modern("1.00 GiB", "8.00 GiB", "0.50 GiB", "7.00 GiB", "6.00 GiB", "0.20 GiB")
    second = modern("3.00 GiB", "9.00 GiB", "0.10 GiB", "8.00 GiB", "7.00 GiB", "0.30 GiB")
    numbers = memlab.explain_error(f"[rank0]: {first}\n[rank1]: {second}\nKilled").numbers
    assert numbers == memlab.explain_error(first).numbers


def test_colours_wraps_boxes_and_html_are_no_part_of_a_message():
    plain = modern("1.00 GiB", "8.00 GiB", "0.50 GiB", "7.00 GiB", "6.00 GiB", "0.20 GiB")
    numbers = memlab.explain_error(plain).numbers
    wrapped = "\n".join(f"│ \x1b[31m{part}\x1b[0m │" for part in plain.split())
    assert memlab.explain_error(wrapped).numbers == numbers
    assert memlab.explain_error(f"<pre><b>{plain}</b>&nbsp;</pre>").numbers == numbers


FULL = modern("256.00 MiB", "23.69 GiB", "100.00 MiB", "23.50 GiB", "22.80 GiB", "120.00 MiB")


def test_a_frame_of_evaluation_is_seen():
    found = verdicts(f'File "trainer.py", line 1, in evaluation_loop\n{FULL}')
    assert found["evaluation or generation"] == "likely"
    assert found["too large a step"] == "possible"
    found = verdicts(f"    loss.backward()\n{FULL}")
    assert found["evaluation or generation"] == "excluded"


@pytest.mark.parametrize(
    ("frame", "verdict"),
    [
        ('File "/home/me/eval_completion.py", line 3, in main', "likely"),
        ('File "train.py", line 3, in validate_epoch', "likely"),
        ('File "C:\\me\\generate.py", line 3, in <module>', "likely"),
        ('File "train.py", line 3, in val_one_epoch', "likely"),
        ('File "/home/me/test.py", line 3, in <module>', "likely"),
        ("/home/me/run.py:159 in validate_all", "likely"),
        ("File ~/me/trainer.py:2515, in Trainer.evaluate(self)", "likely"),
        ('File "train.py", line 3, in latest_interval', "unknown"),
        ('File "/home/me/check_it.py", line 3, in test_forward', "unknown"),
        ('File "/home/me/generator.py", line 3, in forward', "unknown"),
        ('File "/home/me/eval/train.py", line 3, in predict', "unknown"),
        ('File "/usr/lib/python3/site-packages/evaluate/eval.py", line 3, in evaluated', "unknown"),
        ('File "eval.py", line 3, in main\n    loss.backward()', "excluded"),
    ],
)
def test_names_of_own_files_and_functions_say_that_it_evaluates(frame, verdict):
    assert verdicts(f"{frame}\n{FULL}")["evaluation or generation"] == verdict


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ("Loading checkpoint shards:  57%|#### | 4/7 [00:40<00:29]", "unknown"),
        (" 56%|##### | 16000/28347 [23:35<17:18]", "possible"),
        ("  0%|     | 0/10\n 20%|##   | 2/10", "possible"),
        ("Epoch: [0]  [1330/3696]  eta: 0:31:38", "possible"),
        (" 0%|     | 0/10", "excluded"),
        ("epoch 001:   0%|     | 315/72115 [01:24<5:21:16]", "possible"),
        ('40%|## | 2/5\nFile "x.py", line 3, in from_pretrained', "excluded"),
    ],
)
def test_a_leak_needs_steps_before(text, verdict):
    assert verdicts(f"{text}\n{FULL}")["a leak"] == verdict


def asynchronous(asked, capacity, free, allocated, limit="17179869184.00 GiB"):
    """Return the message of PyTorch where the driver's own pools allocate."""
    return (
        "torch.OutOfMemoryError: Allocation on device 0 would exceed allowed memory. (out of "
        f"memory)\nCurrently allocated     : {allocated}\nRequested               : {asked}\n"
        f"Device limit            : {capacity}\nFree (according to CUDA): {free}\nPyTorch limit "
        f"(set by user-supplied memory fraction)\n                        : {limit}"
    )


def test_the_pools_of_the_driver_have_a_message_of_their_own():
    found = memlab.explain_error(asynchronous("1.25 GiB", "6.00 GiB", "0 bytes", "5.05 GiB"))
    sizes = {"requested": 1.25, "capacity": 6, "free": 0, "allocated": 5.05}
    for name, size in sizes.items():
        assert found.numbers[f"{name}_bytes"] == pytest.approx(size * GIB, abs=0.01 * GIB)
    assert found.of_verdict("likely") == ("too large a step",)
    assert "a limit on the process" in found.of_verdict("excluded")


def test_a_limit_as_large_as_the_card_is_none():
    text = (
        "CUDA out of memory. Tried to allocate 96.00 MiB (GPU 0; 11.00 GiB total capacity; 10.89 "
        "GiB already allocated; 0 bytes free; {} allowed; 10.94 GiB reserved in total by PyTorch)"
    )
    assert verdicts(text.format("11.00 GiB"))["a limit on the process"] == "excluded"
    assert verdicts(text.format("10.96 GiB"))["a limit on the process"] == "likely"


@pytest.mark.parametrize(
    ("text", "possible"),
    [
        ("XPU out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity of 15.11 GiB. "
         "Of the allocated memory 0 bytes is allocated by PyTorch, and 0 bytes is reserved by "
         "PyTorch but unallocated.", {"another process", "a limit on the process"}),
        ("Tried to allocate 6.20 GiB. GPU 2 has total 47.40 GiB of which 1.96 GiB is free.",
         {"another process", "too large a step"}),
        ("CUDA out of memory. Tried to allocate 2.00 GiB", {"another process", "too large a step"}),
    ],
)  # fmt: skip
def test_without_who_holds_the_card_two_causes_are_possible(text, possible):
    found = memlab.explain_error(text)
    assert found.of_verdict("likely") == ()
    assert set(found.of_verdict("possible")) == possible


def test_a_bare_message_after_steps_leaves_the_step_and_a_leak():
    found = memlab.explain_error("epoch 7, it 7990\nRuntimeError: CUDA error: out of memory")
    assert set(found.of_verdict("possible")) == {"too large a step", "a leak"}


def test_a_quoted_and_wrapped_message_is_read():
    quoted = FULL.replace("capacity of ", "capacity of\n> ").replace("GPU 0", "GPU\n> 0")
    assert memlab.explain_error(f"> {quoted}") == memlab.explain_error(FULL)


def test_a_request_of_about_the_card_is_not_excluded():
    text = "CUDA out of memory. Tried to allocate 15.91 GiB (GPU 0; 15.90 GiB total capacity"
    assert verdicts(text)["one tensor larger than the card"] == "possible"


def test_a_thousandth_of_slack_is_no_fragmentation():
    text = modern("20.00 MiB", "23.69 GiB", "10.00 MiB", "23.50 GiB", "22.80 GiB", "120.00 MiB")
    assert verdicts(text)["fragmentation"] == "unknown"


@pytest.mark.parametrize(
    ("bars", "verdict"),
    [
        ("0/10 * Epoch (train): 100% 32/32 [00:41]\n0/10 * Epoch (valid):   3% 1/32", "likely"),
        ("Validation DataLoader 0:  40%|####      | 2/5", "likely"),
        ("Validation: 100%|####| 5/5\nEpoch 2:  10%|#   | 1/10", "unknown"),
        ("Evaluating:  10%|#   | 1/10\n    loss.backward()", "excluded"),
    ],
)
def test_the_last_progress_says_whether_it_evaluates(bars, verdict):
    assert verdicts(f"{bars}\n{FULL}")["evaluation or generation"] == verdict


def test_the_line_of_the_person_is_named():
    frames = (
        'File "/home/me/train.py", line 24, in train\n    loss.backward()\n'
        'File "/usr/lib/python3/site-packages/torch/_tensor.py", line 9, in backward\n'
    )
    assert memlab.explain_error(frames + FULL).notes == (
        "your own line that failed is /home/me/train.py:24",
    )


@pytest.mark.parametrize("part", ["<", "(", " \n", "1 ", "out of memory ", "│", 'File "'])
def test_long_nonsense_is_read_to_its_end(part):
    assert memlab.explain_error(part * 200_000 + "\nKilled").of_verdict("possible")


def test_nothing_leaks_before_the_first_step_ends():
    assert verdicts(f"  File 'adamw.py', line 2, in _init_group\n{FULL}")["a leak"] == "excluded"
    assert verdicts(f"Epoch 3:  12%|#  |\n{FULL}")["a leak"] == "possible"
    assert verdicts(f"Epoch 1/9\n{FULL}")["a leak"] == "unknown"  # some count from 1


def test_a_step_that_fitted_before_is_not_simply_too_large():
    assert verdicts(FULL)["too large a step"] == "likely"
    assert verdicts(f"epoch 7, it 7990\n{FULL}")["too large a step"] == "possible"


@pytest.mark.parametrize(
    ("text", "cause", "verdict"),
    [
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:75] . DefaultCPUAllocator: can't allocate "
         "memory: you tried to allocate 5077901088 bytes. Error code 12", "host memory", "likely"),
        ("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.", "host memory",
         "likely"),
        ("RuntimeError: unable to mmap 512 bytes from file", "host memory", "likely"),
        ("OSError: [Errno 12] Cannot allocate memory", "host memory", "likely"),
        ("DataLoader worker (pid 12) is killed by signal: Killed.", "host memory", "likely"),
        ("DataLoader worker (pid(s) 12, 13) is killed by signal: Killed", "host memory", "likely"),
        ("DataLoader worker is killed by signal: Killed.", "host memory", "likely"),
        ("$ Torch: not enough memory: you tried to allocate 72GB. Buy new RAM!", "host memory",
         "likely"),
        ("Killed", "host memory", "possible"),
        ("CUDA out of memory. Tried to allocate 218.96 GiB", "one tensor larger than the card",
         "possible"),
        ("failed (exitcode: -9) local_rank: 0", "host memory", "possible"),
        ("DataLoader worker (pid 13) is killed by signal: Bus error.", "shared memory", "likely"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
         "a library's workspace", "unknown"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
         "host memory", "excluded"),
        ("RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", "too large a step",
         "possible"),
        ("RuntimeError: Unable to find a valid cuDNN algorithm to run convolution",
         "another process", "possible"),
        ("Error out of memory at line 380 in file /bitsandbytes/csrc/pythonInterface.c",
         "host memory", "possible"),
        ("ValueError: No available memory for the cache blocks. Try increasing "
         "`gpu_memory_utilization`", "a limit on the process", "possible"),
        ("ValueError: The model's max seq len (4096) is larger than the maximum number of tokens "
         "that can be stored in KV cache (3664).", "too large a step", "possible"),
        ("KV cache is needed, which is larger than the available KV cache memory (3.05 GiB)",
         "a limit on the process", "possible"),
        ("RuntimeError: Current platform can NOT allocate memory block with size larger than 4GB! "
         "Tried to allocate 7.62 GiB (GPU  0; 15.11 GiB total capacity; 334.79 MiB already "
         "allocated; 474.00 MiB reserved in total by PyTorch)", "a limit on the process", "likely"),
        ("Dataloader worker (pid 15623) is killed by signaled: Killed", "host memory", "likely"),
        ("RuntimeError: CUDA error: out of memory", "too large a step", "possible"),
        ("RuntimeError: CUDA error: out of memory", "host memory", "unknown"),
        ("THCudaCheck FAIL file=/THC/generic/THCStorage.cu line=58 error=2 : out of memory",
         "another process", "possible"),
        ("RuntimeError: CUDA driver error: out of memory", "too large a step", "possible"),
        ("Caught RuntimeError in pin memory thread for device 0.\nCUDA error: out of memory",
         "host memory", "likely"),
        ("numpy.core._exceptions._ArrayMemoryError: Unable to allocate 1.61 GiB for an array",
         "host memory", "likely"),
        ("terminate called after throwing an instance of 'std::bad_alloc'", "host memory",
         "likely"),
        ("slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.batch", "host memory",
         "likely"),
        ("train.py exits with return code = -9", "host memory", "possible"),
        ("returned non-zero exit status 137.", "host memory", "possible"),
        ("RuntimeError: unable to write to file </torch_29919_1396182366>", "shared memory",
         "likely"),
        ("Error while creating shared memory segment /dev/shm/nccl-BA2cWe (size 33030528)",
         "shared memory", "likely"),
        ("MemoryError: bad allocation: cudaErrorMemoryAllocation: out of memory",
         "host memory", "unknown"),
        ("WARNING: ran out of memory, skipping batch", "too large a step", "possible"),
        ("NCCL WARN Cuda failure 'out of memory'", "a library's workspace", "possible"),
        ("CUDA out of memory. Tried to allocate more than 1EB memory.",
         "one tensor larger than the card", "likely"),
        ("RuntimeError: Invalid buffer size: 60.00 GB", "one tensor larger than the card",
         "likely"),
        ("ValueError: Free memory on device (4.05/23.65 GiB) on startup is less than desired GPU "
         "memory utilization (0.9, 21.28 GiB).", "another process", "likely"),
        ("ValueError: Free memory on device (20.05/23.65 GiB) on startup is less than desired GPU "
         "memory utilization (0.9, 21.28 GiB).", "another process", "possible"),
    ],
)  # fmt: skip
def test_other_forms_are_known(text, cause, verdict):
    assert verdicts(text)[cause] == verdict


@pytest.mark.parametrize("text", ["nonsense", "显存不足", "<html></html>", "x" * 10**6,
                                  "I killed the process"])  # fmt: skip
def test_what_has_no_error_gets_no_cause(text):
    found = memlab.explain_error(text)
    assert found.causes == ()
    assert "no out-of-memory error" in found.message


def test_texts_of_other_frameworks_are_named():
    assert "TensorFlow" in memlab.explain_error("RESOURCE_EXHAUSTED: Out of memory").message


@pytest.mark.parametrize("wrong", [{"message": ""}, {"message": "x" * (10**7 + 1)},
                                   {"message": 3}, {"snapshot": "no.pickle"}])  # fmt: skip
def test_wrong_input_is_an_error(wrong):
    with pytest.raises(MemlabError):
        memlab.explain_error(**wrong)


def test_html_escapes_what_it_shows():
    assert "<script" not in memlab.explain_error(f"<script>{FULL}")._repr_html_()


# with a snapshot, with a result


@pytest.fixture
def file_of(tmp_path):
    """Return a function that writes a snapshot and returns its path."""

    def written(snapshot):
        dump(tmp_path / "snapshot.pickle", snapshot.snapshot())
        return str(tmp_path / "snapshot.pickle")

    return written


def test_a_snapshot_decides_what_fragmentation_and_leaks_are(file_of):
    assert verdicts("", snapshot=file_of(fragmented()))["fragmentation"] == "likely"
    found = verdicts(FULL, snapshot=file_of(training(8, leaks=True)))
    assert found["a leak"] == "likely"
    assert found["too large a step"] == "possible"
    assert verdicts(FULL, snapshot=file_of(training(8)))["a leak"] == "excluded"


def test_a_snapshot_says_what_held_most(file_of):
    path = file_of(training(8, leaks=True))
    found = memlab.explain_error(snapshot=path)
    held = memlab.open_snapshot(path).peak_holdings[0]
    assert found.notes[0].endswith(held.place)
    assert memlab.explain_error(snapshot=memlab.open_snapshot(path)) == found


def test_a_result_says_whether_the_step_alone_is_too_large():
    large = memlab.explain_error(FULL, result=a_result(peak_allocated_bytes=23 * GIB))
    assert "too large a step" in large.of_verdict("likely")
    small = memlab.explain_error(FULL, result=a_result(peak_allocated_bytes=10 * GIB))
    assert "too large a step" in small.of_verdict("possible")
    assert "12.8 GiB is held by something beside the step" in small.notes


def invoke(*arguments, **more):
    return CliRunner().invoke(commands.memlab, ["explain", *arguments], **more)


def test_the_command_reads_a_text_a_file_and_stdin(tmp_path):
    path = tmp_path / "error.txt"
    path.write_text(FULL)
    for done in (invoke(FULL), invoke(str(path)), invoke("-", input=FULL), invoke(input=FULL)):
        assert done.exit_code == 0, done.output
        assert "likely: too large a step" in done.output
    printed_json = json.loads(invoke(FULL, "--json").output)
    assert printed_json["numbers"]["requested_bytes"] == 256 * 2**20
    assert invoke("nonsense").exit_code == 3


def test_the_command_refuses_what_is_no_text(tmp_path):
    path = tmp_path / "binary"
    path.write_bytes(b"\0\1")
    assert invoke(str(path)).exit_code == 2
    assert invoke("a.pickle", "--snapshot", "b.pickle").exit_code == 2
    assert invoke(input="").exit_code == 2
    assert invoke("no_such.log").exit_code == 2


def test_the_command_opens_a_snapshot(file_of):
    done = invoke(file_of(fragmented()), input="")
    assert done.exit_code == 0, done.output
    assert "likely: fragmentation" in done.output
