"""Programs of the ordinary kind: each prints the same in a sandbox as outside of it.

What they print depends on no version of Python, no time and no machine.
"""

PROGRAMS = {
    "asyncio": """
import asyncio
async def double(x):
    await asyncio.sleep(0.01)
    return 2 * x
async def main(): return await asyncio.gather(*map(double, range(5)))
print(asyncio.run(main()))
""",
    "asyncio, twice, with a queue": """
import asyncio
async def main():
    queue, found = asyncio.Queue(2), []
    async def produce():
        for i in range(5): await queue.put(i)
        await queue.put(None)
    task = asyncio.create_task(produce())
    while (item := await queue.get()) is not None: found.append(item)
    await task
    return found
print(asyncio.run(main()), asyncio.run(main()))
""",
    "asyncio, threads": """
import asyncio
async def main():
    call = asyncio.get_running_loop().run_in_executor(None, sum, [1, 2, 3])
    return await call, await asyncio.to_thread(max, 4, 7)
print(asyncio.run(main()))
""",
    "asyncio, a timeout": """
import asyncio
async def main():
    try: await asyncio.wait_for(asyncio.sleep(3600), 0.01)
    except asyncio.TimeoutError: print("timeout")
asyncio.run(main())
""",
    "asyncio, a program": """
import asyncio, sys
async def main():
    done = await asyncio.create_subprocess_exec(
        "cat", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE)
    return await done.communicate(b"through a program"), done.returncode
print(asyncio.run(main()))
""",
    "asyncio, streams over a pair": """
import asyncio, socket
async def main():
    a, b = socket.socketpair()
    (reader, kept), (unread, writer) = [
        await asyncio.open_connection(sock=each) for each in (a, b)]
    writer.writelines([b"one ", b"two\\n"])
    await writer.drain()
    print(await reader.readline())
    writer.close()
    print(await reader.read())
    kept.close()
asyncio.run(main())
""",
    "asyncio, signals": """
import asyncio, os, signal
async def main():
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, done.set)
    signal.raise_signal(signal.SIGUSR1)
    await done.wait()
    print("signal")
asyncio.run(main())
""",
    "asyncio, an error": """
import asyncio
async def fail(): raise ValueError("inside")
async def main(): return await asyncio.gather(fail(), return_exceptions=True)
print(asyncio.run(main()))
""",
    "threading": """
import threading
total, lock = 0, threading.Lock()
def add():
    global total
    for _ in range(1000):
        with lock: total += 1
threads = [threading.Thread(target=add) for _ in range(4)]
for each in threads: each.start()
for each in threads: each.join()
print(total)
""",
    "threading, conditions and barriers": """
import threading
barrier, found, condition = threading.Barrier(3), [], threading.Condition()
def work(i):
    barrier.wait()
    with condition:
        found.append(i); condition.notify()
for i in range(3): threading.Thread(target=work, args=(i,)).start()
with condition: condition.wait_for(lambda: len(found) == 3)
print(sorted(found))
""",
    "threading, a timer": """
import threading
event = threading.Event()
threading.Timer(0.01, event.set).start()
print(event.wait(60))
""",
    "queue": """
import queue, threading
q = queue.PriorityQueue()
threading.Thread(target=lambda: [q.put(i) for i in (3, 1, 2)]).start()
print(sorted(q.get() for _ in range(3)))
""",
    "concurrent.futures, threads": """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as pool: print(list(pool.map(abs, [-1, 2, -3])))
""",
    "multiprocessing, a pipe": """
import multiprocessing
context = multiprocessing.get_context("fork")
ours, theirs = context.Pipe()
def work(end): end.send([2 * x for x in end.recv()])
process = context.Process(target=work, args=(theirs,))
process.start()
ours.send([1, 2, 3])
print(ours.recv())
process.join()
print(process.exitcode)
""",
    "fork": """
import os
reader, writer = os.pipe()
if os.fork() == 0:
    os.write(writer, b"child"); os._exit(3)
_, status = os.wait()
print(os.read(reader, 100), os.waitstatus_to_exitcode(status))
""",
    "subprocess": """
import subprocess, sys
done = subprocess.run(["sort"], input="b\\na\\n", capture_output=True, text=True)
print(repr(done.stdout), done.returncode)
print(subprocess.check_output("echo $((6 * 7)) | tr 4 5", shell=True))
""",
    "subprocess, Python": """
import subprocess, sys
print(subprocess.run([sys.executable, "-I", "-c", "print(6 * 7)"],
      capture_output=True, text=True).stdout)
""",
    "subprocess, a timeout": """
import subprocess
try: subprocess.run(["sleep", "3600"], timeout=0.05)
except subprocess.TimeoutExpired: print("timeout")
""",
    "subprocess, a session": """
import subprocess
print(subprocess.run(["true"], start_new_session=True).returncode)
""",
    "signal": """
import signal
found = []
signal.signal(signal.SIGALRM, lambda *_: found.append("alarm"))
signal.setitimer(signal.ITIMER_REAL, 0.01)
while not found: pass
print(found, signal.signal(signal.SIGALRM, signal.SIG_DFL) is None)
""",
    "selectors": """
import selectors, socket
a, b = socket.socketpair()
with selectors.DefaultSelector() as selector:
    selector.register(b, selectors.EVENT_READ, "b")
    a.send(b"x")
    print([key.data for key, _ in selector.select(60)], b.recv(1))
""",
    "socket, a pair with a timeout": """
import socket
a, b = socket.socketpair()
a.settimeout(0.01)
try: a.recv(1)
except TimeoutError: print("timeout")
b.sendall(b"x" * 100_000)
b.shutdown(socket.SHUT_WR)
print(len(a.makefile("rb").read()))
""",
    "tempfile": """
import tempfile, os
with tempfile.TemporaryDirectory() as folder:
    with tempfile.NamedTemporaryFile("w+", dir=folder) as file:
        file.write("text"); file.seek(0); print(file.read())
    with open(os.path.join(folder, "x"), "w") as file: file.write("x")
    print(os.listdir(folder))
with tempfile.TemporaryFile() as file: print(file.write(b"abc"))
with tempfile.SpooledTemporaryFile() as file: print(file.write(b"abcd"))
""",
    "pathlib and shutil": """
import pathlib, shutil
folder = pathlib.Path("folder/inner"); folder.mkdir(parents=True)
(folder / "a.txt").write_text("a")
shutil.copytree("folder", "copy"); shutil.move("copy", "moved")
print(sorted(str(p) for p in pathlib.Path("moved").rglob("*")))
(folder / "a.txt").replace("b.txt"); print(pathlib.Path("b.txt").read_text())
shutil.make_archive("kept", "zip", "moved")
for each in ("folder", "moved"): shutil.rmtree(each)
for each in ("b.txt", "kept.zip"): pathlib.Path(each).unlink()
""",
    "sqlite3": """
import os, sqlite3
for name in (":memory:", "data.db"):
    with sqlite3.connect(name) as base:
        base.execute("create table t (x)")
        base.executemany("insert into t values (?)", [(i,) for i in range(10)])
    print(base.execute("select sum(x) from t").fetchone())
    base.close()
base = sqlite3.connect("data.db")
print(base.execute("pragma journal_mode=wal").fetchone())
base.execute("insert into t values (100)"); base.commit()
print(base.execute("select max(x) from t").fetchone()); base.close()
os.unlink("data.db")
""",
    "fcntl": """
import fcntl, os
with open("lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX); fcntl.lockf(file, fcntl.LOCK_EX)
    print(fcntl.fcntl(file, fcntl.F_GETFD))
os.unlink("lock")
""",
    "mmap": """
import mmap, os
with open("file", "w+b") as file:
    file.write(b"0123456789"); file.flush()
    with mmap.mmap(file.fileno(), 0) as found: found[2:4] = b"ab"; print(found[:])
os.unlink("file")
with mmap.mmap(-1, 4096) as found: found[:3] = b"abc"; print(found[:4])
""",
    "os": """
import os
fd = os.open("file", os.O_CREAT | os.O_RDWR); print(os.write(fd, b"abc"))
print(os.pread(fd, 2, 1), os.lseek(fd, 0, os.SEEK_END), os.dup(fd) > fd)
os.ftruncate(fd, 1); print(os.fstat(fd).st_size); os.close(fd)
os.link("file", "other"); os.symlink("other", "link"); print(os.readlink("link"))
for each in ("file", "other", "link"): os.unlink(each)
print(os.cpu_count() > 0, len(os.urandom(4)), os.umask(18))
""",
    "inotify is not needed by os.scandir": """
import os
os.mkdir("d"); open("d/x", "w").close()
with os.scandir("d") as found: print([(e.name, e.is_file()) for e in found])
os.unlink("d/x"); os.rmdir("d")
""",
    "csv and json": """
import csv, io, json
rows = list(csv.DictReader(io.StringIO("a,b\\n1,2\\n3,4\\n")))
print(json.dumps(rows, sort_keys=True), json.loads('{"x": [1, 2.5, null]}'))
""",
    "zip, gzip, bz2, lzma, tar": """
import bz2, gzip, io, lzma, tarfile, zipfile
data = b"data" * 100
for each in (gzip, bz2, lzma): print(each.decompress(each.compress(data)) == data)
target = io.BytesIO()
with zipfile.ZipFile(target, "w") as file: file.writestr("a", "b")
print(zipfile.ZipFile(target).namelist())
with tarfile.open(fileobj=io.BytesIO(), mode="w") as file:
    info = tarfile.TarInfo("x"); info.size = 1; file.addfile(info, io.BytesIO(b"y"))
    print(file.getnames())
""",
    "pickle and copy": """
import copy, pickle, shelve
value = {"a": [1, {2, 3}], "b": (None, 1.5)}
print(pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value))
""",
    "datetime": """
import datetime, time, calendar
print(datetime.date(2024, 2, 28) + datetime.timedelta(days=2), calendar.isleap(2024))
begin = time.monotonic(); time.sleep(0.01)
print(time.monotonic() > begin, time.time() > 1e9)
print(datetime.timezone.utc.tzname(None))
""",
    "random and statistics": """
import random, statistics, secrets
random.seed(7); print(random.randint(1, 100), random.sample(range(10), 3))
print(statistics.median([1, 3, 2]), len(secrets.token_hex(4)))
""",
    "decimal and fractions": """
import decimal, fractions, math, cmath
print(decimal.Decimal(1) / 7, fractions.Fraction(1, 3) + 1)
print(math.comb(10, 3), cmath.sqrt(-1))
""",
    "functools and itertools": """
import functools, itertools, operator
@functools.lru_cache(None)
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
print(fib(80), list(itertools.accumulate([1, 2, 3], operator.mul)))
""",
    "recursion": """
import sys
sys.setrecursionlimit(5000)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
print(depth(3000))
""",
    "dataclasses, enum, typing, abc": """
import abc, dataclasses, enum, typing
@dataclasses.dataclass(order=True)
class Point: x: int; y: int = 2
class Colour(enum.Enum): RED = 1
print(Point(1), sorted([Point(2), Point(1)])[0].x, Colour(1))
print(typing.get_type_hints(Point))
""",
    "heapq, bisect, collections": """
import bisect, collections, heapq
heap = [5, 1, 3]; heapq.heapify(heap)
print(heapq.heappop(heap), bisect.bisect([1, 2, 4], 3))
print(collections.Counter("hello").most_common(1), collections.deque([1, 2], 1))
""",
    "re, string, textwrap, difflib": """
import difflib, re, textwrap, unicodedata
print(re.findall(r"(\\w)(\\d)", "a1 b2"), textwrap.wrap("one two three", 7))
print(difflib.get_close_matches("appel", ["apple", "pear"]), unicodedata.name("é"))
""",
    "hashlib, hmac, base64, struct": """
import base64, hashlib, hmac, struct, uuid, zlib
print(hashlib.sha256(b"x").hexdigest()[:8], base64.b64encode(b"abc"), zlib.crc32(b"x"))
print(hmac.new(b"k", b"m", "sha1").hexdigest()[:8], struct.pack(">H", 5))
print(len(str(uuid.uuid4())))
""",
    "unittest and doctest": """
import io, unittest
class Test(unittest.TestCase):
    def test_sum(self): self.assertEqual(1 + 1, 2)
result = unittest.TextTestRunner(io.StringIO()).run(
    unittest.defaultTestLoader.loadTestsFromTestCase(Test))
print(result.testsRun, result.wasSuccessful())
""",
    "contextlib, logging, warnings": """
import contextlib, io, logging, warnings
text = io.StringIO()
with contextlib.redirect_stdout(text): print("hidden")
logging.basicConfig(stream=text, level=logging.INFO, force=True); logging.info("logged")
print(text.getvalue())
logging.basicConfig(force=True, handlers=[logging.NullHandler()])
""",
    "ctypes": """
import ctypes
print(ctypes.CDLL(None).abs(-5), ctypes.sizeof(ctypes.c_double))
""",
    "xml, html, urllib.parse, email": """
import email.message, html, urllib.parse, xml.etree.ElementTree as tree
print(tree.fromstring("<a><b>1</b></a>").find("b").text, html.unescape("&lt;"))
print(urllib.parse.urlparse("http://x/y?z=1").query)
""",
    "input": """
import io, sys
sys.stdin = io.StringIO("3\\n4 5\\n")
print(int(input()) + sum(map(int, input().split())))
sys.stdin = sys.__stdin__
""",
    "input that is not there": """
try: input()
except EOFError: print("end")
""",
    "resource, platform, getpass": """
import platform, resource, time
print(platform.system(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0)
print(time.process_time() > 0)
""",
    "gc and weakref": """
import gc, weakref, tracemalloc
class Thing: pass
thing = Thing(); seen = weakref.ref(thing); del thing; gc.collect(); print(seen())
tracemalloc.start(); print(tracemalloc.get_traced_memory()[0] >= 0); tracemalloc.stop()
""",
    "importlib, runpy and inspect": """
import importlib, os, runpy, sys
open("mine.py", "w").write("VALUE = 5\\nprint(__name__)\\n")
importlib.invalidate_caches()
print(importlib.import_module("mine").VALUE, runpy.run_path("mine.py")["VALUE"])
os.unlink("mine.py"); del sys.modules["mine"]
""",
}

# Programs that a sandbox refuses, and the error: these need the network, even the
# place's own, or memory that is shared by name.
REFUSED = {
    "http.server": (
        "import http.server; http.server.HTTPServer(('127.0.0.1', 0), None)",
        "PermissionError",
    ),
    "socket.socket": ("import socket; socket.socket()", "PermissionError"),
    "urllib.request": (
        "import urllib.request; urllib.request.urlopen('http://127.0.0.1:1')",
        "URLError",
    ),
    "multiprocessing.Lock": ("import multiprocessing; multiprocessing.Lock()", "Error"),
    "multiprocessing.Pool": (
        "import multiprocessing; multiprocessing.Pool(2)",
        "Error",
    ),
    "ProcessPoolExecutor": (
        """
from concurrent.futures import ProcessPoolExecutor
with ProcessPoolExecutor(2) as pool: print(list(pool.map(abs, [-1])))""",
        "Error",
    ),
    "multiprocessing.shared_memory": (
        """
from multiprocessing.shared_memory import SharedMemory
SharedMemory(create=True, size=1000)""",
        "Error",
    ),
    "os.memfd_create": ("import os; os.memfd_create('x')", "PermissionError"),
    "subprocess, a larger pipe": (
        "import fcntl, os; fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)",
        "PermissionError",
    ),
}
