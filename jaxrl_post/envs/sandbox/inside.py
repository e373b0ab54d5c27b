"""The program that runs inside of a sandbox: it limits itself, then carries out calls.

It is handed to a plain Python as text, so it imports only the standard library and
nothing of this package, and runs on any Python from 3.9 on. The process that obeys the
calls is out of the reach of the programs it starts where the mechanism allows that; but
its answers are only believed as far as the programs' own output is.

Standard input brings a length (uint32) and a marshalled value: first what `places.py`
writes as its settings, then the calls. Standard output takes the answers, `ANSWER` and
two texts. The end of the input ends everything.
"""

import marshal
import os
import select
import signal
import struct
import sys
import time

LENGTH = struct.Struct("!I")
# How it ended, exit status or signal, seconds on the clock and of processor time,
# whether output was dropped, and the lengths of standard output and standard error.
ANSWER = struct.Struct("!BiddBII")
EXIT, SIGNAL, TIME, PROCESSOR, REFUSED = range(5)

SET_PDEATHSIG, SET_DUMPABLE, SET_SECCOMP, NO_NEW_PRIVS, SUBREAPER = 1, 4, 22, 38, 36
# A pipe holds at most 1 MiB; what is left in one after the end is read up to this.
LEFT_OVER = 1 << 20


def call(name, *arguments):
    """Calls a function of the C library."""
    import ctypes

    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments) < 0:
        number = ctypes.get_errno()
        shown = ", ".join(str(a) for a in arguments if isinstance(a, int))
        raise OSError(number, f"{name}({shown}): {os.strerror(number)}")


def prctl(option, *arguments):
    """Changes something of this process."""
    import ctypes

    long = [ctypes.c_ulong(a) if isinstance(a, int) else a for a in arguments]
    call("prctl", option, *long + [ctypes.c_ulong(0)] * (4 - len(long)))


def guard(owner, home):
    """Continues in a child; this process ends the place with its owner, or when told.

    It ends last: what has lost its parent becomes its child, and no descendant is left.
    It removes the directory, which an owner that was killed does not; another removes
    what a hostile program made too deep for this.
    The place cannot signal it: it keeps the owner's user and has no limits.
    """
    ends = {signal.SIGTERM, signal.SIGCHLD}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    prctl(SET_PDEATHSIG, signal.SIGTERM)
    prctl(SUBREAPER, 1)
    if os.getppid() != owner:
        os._exit(71)  # It ended before the kernel was asked to tell.
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os.setpgid(child, child)  # Both do this; the first one counts.
    # The child's end is the end of its output, too.
    os.closerange(0, 256)
    ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
    # A child that only stops is not waited for.
    while signal.sigwait(ends) == signal.SIGCHLD:
        if os.waitid(os.P_PID, child, ended):
            break
    # Killing its group ends them all at once, since the filter lets none leave it. The
    # numbers belong to children that were not waited for, so no other process has them.
    os.killpg(child, signal.SIGKILL)
    while True:
        for number in children():
            os.kill(number, signal.SIGKILL)
        try:
            os.wait()
        except ChildProcessError:
            break
    try:
        # The directory itself may be a link by now, where the place is no sandbox.
        inside = () if os.path.islink(home) else os.walk(home, topdown=False)
        for folder, folders, files in inside:
            for name in files:
                os.unlink(os.path.join(folder, name))
            for name in folders:
                path = os.path.join(folder, name)
                os.unlink(path) if os.path.islink(path) else os.rmdir(path)
        os.rmdir(home)
    except (OSError, RecursionError):
        pass
    os._exit(0)


def children():
    """The children of this process, which has one thread."""
    try:
        with open("/proc/thread-self/children") as file:
            return [int(number) for number in file.read().split()]
    except OSError:  # A kernel that does not list them.
        return []


def limit(settings, parent):
    """Applies the settings: limits, user, files, system calls."""
    import ctypes
    import resource

    libc = ctypes.CDLL(None, use_errno=True)
    rules = []
    for path, access in settings["landlock_paths"]:
        try:
            rules.append((os.open(path, os.O_PATH | os.O_CLOEXEC), access))
        except FileNotFoundError:
            pass
    if settings["user"] is not None:
        os.setgroups([])
        os.setresgid(settings["user"], settings["user"], settings["user"])
        os.setresuid(settings["user"], settings["user"], settings["user"])
    for kind, value in settings["limits"]:
        # A hard limit may already be lower than what is asked for.
        _, hard = resource.getrlimit(kind)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)
        resource.setrlimit(kind, (value, value))
    prctl(SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise OSError("the process that started the sandbox is gone")
    prctl(SUBREAPER, 1)
    prctl(SET_DUMPABLE, 0)
    prctl(NO_NEW_PRIVS, 1)
    if settings["landlock"]:
        handled = settings["landlock"]
        ruleset = libc.syscall(444, handled, ctypes.c_size_t(len(handled)), 0)
        if ruleset < 0:
            raise OSError(ctypes.get_errno(), "landlock_create_ruleset")
        for descriptor, access in rules:
            rule = struct.pack("=Qi", access, descriptor)
            call("syscall", 445, ruleset, 1, rule, 0)
            os.close(descriptor)
        call("syscall", 446, ruleset, 0)
        os.close(ruleset)
    if settings["filter"]:
        code = ctypes.create_string_buffer(settings["filter"])
        program = struct.pack(
            "HP", len(settings["filter"]) // 8, ctypes.addressof(code)
        )
        prctl(SET_SECCOMP, 2, ctypes.c_char_p(program))


def write_all(descriptor, data):
    """Writes all bytes, however many system calls it takes."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def read_exactly(descriptor, size):
    """Reads `size` bytes; None if the input ends before."""
    parts = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def read_value(descriptor):
    """Reads a length and a marshalled value; None at the end of the input."""
    head = read_exactly(descriptor, LENGTH.size)
    body = head and read_exactly(descriptor, LENGTH.unpack(head)[0])
    return None if body is None else marshal.loads(body)


def used(process):
    """Processor time of a process in seconds; 0 where the system does not tell."""
    try:
        # The number of its clock, as clock_getcpuclockid(3) has it.
        return time.clock_gettime((~process << 3) | 2)
    except OSError:
        return 0.0


class Output:
    """Up to `most` bytes of what comes out of a pipe."""

    def __init__(self, descriptor, most):
        self.descriptor, self.room = descriptor, most
        self.parts, self.dropped, self.open = [], False, True
        os.set_blocking(descriptor, False)

    def read(self):
        """Reads once; returns the number of bytes, dropped ones too."""
        try:
            part = os.read(self.descriptor, 1 << 16)
        except BlockingIOError:
            return 0
        if not part:
            self.open = False
        kept = part[: self.room]
        self.room -= len(kept)
        self.dropped = self.dropped or len(kept) < len(part)
        if kept:
            self.parts.append(kept)
        return len(part)

    def rest(self):
        """Reads what is left in the pipe, without waiting for more."""
        total = 0
        while self.open and total < LEFT_OVER:
            count = self.read()
            if not count:
                return
            total += count

    def text(self):
        return b"".join(self.parts)


class Interpreter:
    """A child that runs pieces of Python one after the other, with the same names."""

    def __init__(self, close):
        code, self.code = os.pipe()
        self.done, done = os.pipe()
        self.out, out = os.pipe()
        self.err, err = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            try:
                for descriptor in [*close, self.code, self.done, self.out, self.err]:
                    os.close(descriptor)
                as_child(os.open(os.devnull, os.O_RDONLY), out, err)
                # So that what it holds can be counted from outside.
                prctl(SET_DUMPABLE, 1)
                interpret(code, done)
            except BaseException as error:
                os.write(2, (f"{type(error).__name__}: {error}").encode())
            finally:
                os._exit(70)
        for descriptor in (code, done, out, err):
            os.close(descriptor)

    def close(self):
        for descriptor in (self.code, self.done, self.out, self.err):
            os.close(descriptor)


def as_child(stdin, stdout, stderr):
    """Makes three descriptors the standard ones of this process."""
    for number, descriptor in enumerate((stdin, stdout, stderr)):
        os.dup2(descriptor, number)
        if descriptor > 2:
            os.close(descriptor)


def interpret(code, done):
    """Runs pieces of Python for ever; prints the value of a last expression."""
    import ast
    import linecache
    import traceback

    names = {"__name__": "__main__", "__builtins__": __builtins__}
    module = type(sys)("__main__")
    module.__dict__.update(names)
    sys.modules["__main__"] = module
    sys.argv = [""]
    sys.path.insert(0, "")
    count = 0
    while True:
        text = read_value(code)
        if text is None:
            os._exit(0)
        count += 1
        name = f"<{count}>"
        status = 0
        try:
            linecache.cache[name] = len(text), None, text.splitlines(True), name
            tree = ast.parse(text, name)
            last = None
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body.pop().value)
            exec(compile(tree, name, "exec"), module.__dict__)
            if last is not None:
                value = eval(compile(last, name, "eval"), module.__dict__)
                if value is not None:
                    print(repr(value))
        except SystemExit as end:
            flush()
            if end.code is not None and not isinstance(end.code, int):
                print(end.code, file=sys.stderr, flush=True)
                os._exit(1)
            os._exit((end.code or 0) & 255)
        except BaseException as error:
            status = 1
            # The first frame is this function's.
            frames = error.__traceback__ and error.__traceback__.tb_next
            traceback.print_exception(type(error), error, frames)
        flush()
        os.write(done, bytes([status]))


def flush():
    """Writes out what was printed, if the program has not closed the streams."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            pass


class Calls:
    """Carries out calls until the input ends."""

    def __init__(self, settings, reader, writer):
        self.reader, self.writer = reader, writer
        self.most = settings["output_bytes"]
        # Whether no other program has this user, or none can be seen: then a signal to
        # all processes reaches only this sandbox's.
        self.alone = settings["alone"]
        self.interpreter = None
        # Status of each child that has ended.
        self.children, self.ended = set(), {}

    def start(self):
        """Starts the interpreter and returns it."""
        self.interpreter = Interpreter([self.reader, self.writer])
        self.children.add(self.interpreter.process)
        return self.interpreter

    def stop(self):
        """Forgets the interpreter, which has ended."""
        worker, self.interpreter = self.interpreter, None
        if worker is not None:
            self.ended.pop(worker.process, None)
            worker.close()

    def answer(self, ended, status, times, out=b"", err=b"", dropped=False):
        data = ANSWER.pack(ended, status, *times, dropped, len(out), len(err))
        write_all(self.writer, data + out + err)

    def serve(self):
        """Carries out the calls; an error of this process's own is an answer, too."""
        while True:
            call = read_value(self.reader)
            if call is None:
                return
            begin = time.monotonic()
            try:
                getattr(self, call[0])(begin, *call[1:])
            except (OSError, ValueError, MemoryError) as error:
                self.answer(
                    REFUSED,
                    0,
                    (time.monotonic() - begin, 0.0),
                    err=str(error).encode("utf-8", "replace"),
                )

    def python(self, begin, text, most):
        self.reap()
        # It may have ended since the last call, of a thread or a signal.
        if self.interpreter is not None and self.interpreter.process in self.ended:
            self.stop()
        worker = self.interpreter or self.start()
        body = marshal.dumps(text, 2)
        self.collect(
            begin,
            most,
            worker.process,
            Output(worker.out, self.most),
            Output(worker.err, self.most),
            worker.code,
            LENGTH.pack(len(body)) + body,
            worker.done,
        )

    def run(self, begin, arguments, environment, data, most):
        stdin, feed = os.pipe()
        out, stdout = os.pipe()
        err, stderr = os.pipe()
        process = os.fork()
        if process == 0:
            status = 126
            try:
                as_child(stdin, stdout, stderr)
                os.closerange(3, 256)
                signal.signal(signal.SIGPIPE, signal.SIG_DFL)
                os.execvpe(arguments[0], arguments, dict(os.environ, **environment))
            except OSError as error:
                status = 127 if isinstance(error, FileNotFoundError) else 126
                os.write(2, (f"{arguments[0]}: {error.strerror}\n").encode())
            finally:
                os._exit(status)
        self.children.add(process)
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        try:
            self.collect(
                begin,
                most,
                process,
                Output(out, self.most),
                Output(err, self.most),
                feed,
                data,
                None,
            )
        finally:
            os.close(out)
            os.close(err)

    def collect(self, begin, most, process, out, err, feed, data, done):
        """Feeds a child and reads it until it is done, ends, or its time is over.

        `most` are seconds on the clock and of the processor.
        """
        spent, before = 0.0, used(process)
        poll = select.poll()
        for output in (out, err):
            poll.register(output.descriptor, select.POLLIN)
        os.set_blocking(feed, False)
        poll.register(feed, select.POLLOUT)
        feeding, status = True, None
        if done is not None:
            poll.register(done, select.POLLIN)
        while True:
            spent = max(spent, used(process) - before)
            left = min(begin + most[0] - time.monotonic(), most[1] - spent)
            self.reap()
            if process in self.ended or left <= 0:
                break
            # The end of a child closes its pipes; where another process keeps them
            # open, its end is seen a little later.
            pause = 10.0 if out.open or err.open else 1.0
            for descriptor, _ in poll.poll(min(pause, 1e3 * left)):
                if descriptor == feed:
                    try:
                        data = data[os.write(feed, data[: 1 << 16]) :]
                    except BlockingIOError:
                        pass
                    except OSError:
                        data = b""
                    if not data and feeding:
                        poll.unregister(feed)
                        feeding = False
                        if done is None:
                            os.close(feed)
                elif descriptor == done:
                    status = os.read(descriptor, 1)
                    if not status:
                        status = None
                        poll.unregister(descriptor)
                else:
                    output = out if descriptor == out.descriptor else err
                    output.read()
                    if not output.open:
                        poll.unregister(descriptor)
            if status is not None:
                break
        if feeding and done is None:
            os.close(feed)
        over = status is None and process not in self.ended
        if over:
            self.kill(process)
        out.rest()
        err.rest()
        seconds = time.monotonic() - begin
        dropped = out.dropped or err.dropped
        if over:
            kind, number = PROCESSOR if spent >= most[1] else TIME, 0
        elif status is not None:
            kind, number = EXIT, status[0]
        else:
            kind, number = self.ended[process]
        if done is None:
            self.ended.pop(process, None)
        elif status is None:
            self.stop()
        self.answer(kind, number, (seconds, spent), out.text(), err.text(), dropped)

    def reap(self):
        """Collects the status of all children that have ended, orphans included."""
        while True:
            try:
                process, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if not process:
                return
            if process not in self.children:  # An orphan.
                continue
            self.children.discard(process)
            if os.WIFSIGNALED(status):
                self.ended[process] = SIGNAL, os.WTERMSIG(status)
            else:
                self.ended[process] = EXIT, os.WEXITSTATUS(status)

    def kill(self, process):
        # The interpreter goes as well: what it started cannot be told from the rest.
        if self.alone:
            try:
                os.kill(-1, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass
            if self.interpreter is not None and self.interpreter.process != process:
                self.stop()
        else:
            # The filter may refuse this, too: then the place is closed from outside.
            try:
                os.kill(process, signal.SIGKILL)
            except PermissionError:
                return
        until = time.monotonic() + 1
        while process not in self.ended and time.monotonic() < until:
            self.reap()
            time.sleep(0.001)

    def write(self, begin, path, data, mode):
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        descriptor = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, mode
        )
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)
        self.answer(EXIT, 0, (time.monotonic() - begin, 0.0))

    def read(self, begin, path, most):
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            data = b""
            while len(data) <= most:
                part = os.read(descriptor, 1 << 16)
                if not part:
                    break
                data += part
        finally:
            os.close(descriptor)
        times = time.monotonic() - begin, 0.0
        self.answer(EXIT, 0, times, data[:most], b"", len(data) > most)


def main():
    """Reads the settings, gives up rights, and serves."""
    settings = read_value(0)
    if settings is None:
        return
    # The calls' own descriptors are out of the way of those that programs expect.
    reader, writer = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDWR)
    os.dup2(empty, 0)
    os.dup2(empty, 1)
    os.umask(0o022)
    try:
        parent = os.getppid()
        if settings["owner"]:
            parent = os.getpid()
            guard(settings["owner"], settings["home"])
        limit(settings, parent)
        os.chdir(settings["home"])
        os.environ.clear()
        os.environ.update(settings["environment"])
        calls = Calls(settings, reader, writer)
        # Starting the interpreter now makes the first call of a warm place quick.
        calls.start()
    except BlockingIOError as error:
        told = "the user runs as many processes as the limit allows"
        os.write(2, (f"{told} ({error})").encode())
        os._exit(71)
    except (OSError, ValueError, ImportError) as error:
        os.write(2, (f"{type(error).__name__}: {error}").encode())
        os._exit(71)
    os.dup2(empty, 2)
    os.close(empty)
    calls.answer(EXIT, 0, (0.0, 0.0))
    calls.serve()


if __name__ == "__main__":
    main()
