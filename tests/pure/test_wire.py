"""Messages between caller and worker: whole, of the right job, and never waited for in vain."""

import os
import random
import select
import socket
import struct
import threading
import time

import pytest

from memlab.runtime.wire import HEADER, MAGIC, MOST_BYTES, PIECE_BYTES, Channel, Garbage


class Stopped(Exception):
    """What a check raises."""


def stop_at(count):
    """Return a check that raises when it is called this often."""
    calls = iter(range(count - 1))

    def check():
        if next(calls, None) is None:
            raise Stopped

    return check


def never():
    return False


@pytest.fixture
def ends():
    """A caller's channel, and the bare socket of what ought to be a worker."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours, blocks=False)
    yield channel, theirs
    channel.close()
    theirs.close()


def message(number, content):
    return HEADER.pack(MAGIC, number, len(content)) + content


def test_messages_arrive_whole_however_they_are_cut(ends):
    channel, worker = ends
    sent = [(number, os.urandom(size)) for number, size in enumerate((0, 1, 7, 100, 3000))]
    stream = b"".join(message(*one) for one in sent)
    chance = random.Random(0)
    received = []
    while stream:
        piece, stream = stream[: (cut := chance.randrange(1, 60))], stream[cut:]
        worker.sendall(piece)
        while True:
            try:
                received.append(channel.receive_checked(stop_at(2), never))
            except Stopped:
                break
    assert received == sent


@pytest.mark.parametrize(
    "stream", [b"", MAGIC[:3], HEADER.pack(MAGIC, 1, 100), message(1, b"x")[:-1]]
)
def test_what_is_not_all_there_is_waited_for_only_as_long_as_the_caller_likes(ends, stream):
    channel, worker = ends
    worker.sendall(stream)
    with pytest.raises(Stopped):
        channel.receive_checked(stop_at(4), never)


@pytest.mark.parametrize(
    "stream",
    [
        struct.pack("!i", 1000),  # a header of another protocol
        b"\x80",
        MAGIC[:4] + b"\0",
        HEADER.pack(MAGIC, 1, MOST_BYTES + 1),
        HEADER.pack(MAGIC, 2**64 - 1, 2**64 - 1),
    ],
)
def test_what_is_no_message_is_garbage_at_once(ends, stream):
    channel, worker = ends
    worker.sendall(stream)
    with pytest.raises(Garbage):
        channel.receive_checked(stop_at(4), never)


def test_an_answer_that_ends_too_early_is_an_end(ends):
    channel, worker = ends
    worker.sendall(HEADER.pack(MAGIC, 1, 100) + b"x")
    worker.close()
    with pytest.raises(EOFError):
        channel.receive_checked(stop_at(100), never)


def test_the_answer_of_a_process_that_has_ended_is_still_read(ends):
    channel, worker = ends

    def ended():  # it answers between the look for a message and the look whether it lives
        if not select.select([channel.socket], [], [], 0)[0]:
            worker.sendall(message(1, b"answer"))
        return True

    assert channel.receive_checked(stop_at(100), ended) == (1, b"answer")
    # another process holds the worker's end, so that the socket does not end
    with pytest.raises(EOFError):
        channel.receive_checked(stop_at(100), lambda: True)


def test_sending_stops_when_nobody_reads(ends):
    channel, _ = ends
    pieces = 8
    content = bytes(pieces * PIECE_BYTES)
    with pytest.raises(Stopped):
        channel.send_checked(1, content, stop_at(pieces), never)
    with pytest.raises(BrokenPipeError):
        channel.send_checked(1, content, stop_at(pieces), lambda: True)


def test_what_is_sent_in_pieces_arrives(ends):
    channel, worker = ends
    reader = Channel(worker, blocks=True)
    content = os.urandom(20 * PIECE_BYTES + 3)
    thread = threading.Thread(target=lambda: channel.send_checked(5, content, lambda: None, never))
    thread.start()
    assert reader.receive() == (5, content)
    thread.join()


def test_both_ends_may_write_at_once(ends):
    """A worker says what its last job has changed while the next one comes, and reads after it."""
    channel, worker = ends
    reader = Channel(worker, blocks=True)
    last, following = os.urandom(20 * PIECE_BYTES), os.urandom(21 * PIECE_BYTES)
    received = []

    def work():
        reader.send(4, last)
        received.append(reader.receive())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    channel.send_checked(5, following, stop_at_time(end), never)
    thread.join()
    assert received == [(5, following)]
    assert channel.receive_checked(stop_at_time(end), never) == (4, last)


def stop_at_time(end):
    """Return a check that fails after a time at which all would long be over."""

    def check():
        assert time.monotonic() < end

    return check


@pytest.mark.filterwarnings("ignore:This process")  # is multi-threaded, says Python 3.12 of a fork
def test_a_channel_is_its_processs_and_its_sockets_alone(ends):
    channel, _ = ends
    assert channel.is_own()
    child = os.fork()
    if child == 0:
        os._exit(int(channel.is_own()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    other = os.open(os.devnull, os.O_RDONLY)
    os.dup2(other, channel.socket.fileno())  # as when a model closes it and opens a file
    os.close(other)
    assert not channel.is_own()
    channel.close()
    assert not channel.is_own()
