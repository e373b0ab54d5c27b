"""Programs that try to leave a sandbox, or to take more of it than they may."""

SECRET = "secret-of-the-machine"

# Python, with the names `secret`, `folder` (which all may write), `port`, `path` of a
# Unix socket, `abstract` name of another, and `victim`, a process of the same user.
# A program that reaches what it should not prints ESCAPED.
PRELUDE = """
import ctypes, os, resource, select, signal, socket, struct, subprocess, sys
import threading, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(what=""): print("ESCAPED", what, flush=True)
def tried(function, *arguments):
    try: result = function(*arguments)
    except BaseException as error: print(type(error).__name__, error); return None
    escaped(result); return result
def refused(number, *arguments):
    if libc.syscall(number, *arguments) >= 0: escaped(number)
"""

FILES = {
    "reads a file": "tried(lambda: open(secret).read())",
    "reads the accounts": """
for name in ('/etc/passwd', '/etc/shadow', '/etc/hostname', '/etc/ssh/sshd_config'):
    tried(lambda: open(name).read())""",
    "reads environments": """
for name in ('self', 1, victim, os.getppid(), *range(2, 40000)):
    try: text = open(f'/proc/{name}/environ', 'rb').read()
    except OSError: continue
    if b'%s' in text: escaped(name)
""".replace("%s", SECRET),
    "reads its own environment": f"if {SECRET!r} in str(os.environ): escaped()",
    "lists homes": """
for name in ('/root', '/home', '/work', '/srv', '/var'):
    try: found = os.listdir(name)
    except OSError: continue
    if set(found) - {'.pyenv', 'python', 'project'}: escaped(found)""",
    "writes a file": "tried(lambda: open(folder + '/new', 'w').write('x'))",
    "overwrites a file": "tried(lambda: open(folder + '/kept', 'w').write('x'))",
    "appends through a descriptor": "tried(os.open, folder + '/kept', os.O_RDWR)",
    "truncates a file": "tried(os.truncate, folder + '/kept', 0)",
    "renames a file": "tried(os.rename, folder + '/kept', folder + '/gone')",
    "moves a file in": "tried(os.rename, folder + '/kept', 'mine')",
    "deletes a file": "tried(os.unlink, folder + '/kept')",
    "makes a folder": "tried(os.mkdir, folder + '/sub')",
    "links to a file": "tried(lambda: (os.link(secret, 'l'), open('l').read()))",
    "follows a link": "os.symlink(secret, 'l'); tried(lambda: open('l').read())",
    "follows a link to a folder": """
os.symlink(os.path.dirname(secret), 'd'); tried(lambda: open('d/secret').read())""",
    "climbs": "tried(lambda: open('../' * 40 + secret[1:]).read())",
    "climbs through /proc/self/root": """
tried(lambda: open('/proc/self/root' + secret).read())
tried(lambda: open('/proc/1/root' + secret).read())
tried(lambda: open(f'/proc/{os.getppid()}/root' + secret).read())
tried(lambda: open(f'/proc/{os.getppid()}/cwd/../..' + secret).read())""",
    "changes rights": """
try: os.chmod(folder + '/kept', 0o600)
except OSError: pass""",
    "changes times": """
try: os.utime(folder + '/kept', (1, 1))
except OSError: pass""",
    "changes owners": """
try: os.chown(folder + '/kept', 12345, 12345)
except OSError: pass""",
    "sets attributes": """
try: os.setxattr(folder + '/kept', 'user.a', b'b')
except OSError: pass""",
    "makes devices": """
tried(os.mknod, 'disk', 0o60666, os.makedev(254, 0))
tried(os.mknod, 'memory', 0o20666, os.makedev(1, 1))""",
    "opens devices": """
for name in ('sda', 'vda', 'mem', 'kmsg', 'port', 'kvm', 'fuse', 'loop-control'):
    tried(os.open, '/dev/' + name, os.O_RDWR)
for name in ('sda', 'vda', 'mem', 'kmsg'):
    tried(os.open, '/dev/' + name, os.O_RDONLY)""",
    "opens files by handle": """
handle = struct.pack('=IiQ', 8, 1, 2) + bytes(120)
for root in ('/', '.', '/usr'):
    try: at = os.open(root, os.O_RDONLY)
    except PermissionError: continue
    refused(304 if os.uname().machine == 'x86_64' else 265, at, handle, 0)""",
    "writes to the system": """
for name in ('/usr/bin/x', '/etc/ld.so.preload', '/lib/x', '/x', '/dev/x', '/bin/x'):
    tried(lambda: open(name, 'w').write('x'))""",
    "writes to the kernel": """
for name in ('/proc/sys/kernel/core_pattern', '/proc/sysrq-trigger', '/proc/kcore',
             '/proc/sys/vm/drop_caches', '/sys/kernel/uevent_helper',
             '/sys/fs/cgroup/release_agent', '/proc/self/oom_score_adj_'):
    tried(lambda: open(name, 'w').write('0'))""",
    "mounts": """
refused(165 if os.uname().machine == 'x86_64' else 40, b'x', b'.', b'tmpfs', 0, 0)
refused(428, -100, b'/', 1)
refused(430, b'tmpfs', 0)""",
    "leaves by chroot": "os.mkdir('d'); tried(os.chroot, 'd')",
}
NETWORK = {
    "connects": "tried(socket.create_connection, ('127.0.0.1', port), 1)",
    "sends datagrams": """
def send(): socket.socket(2, 2).sendto(b'x', ('127.0.0.1', port))
tried(send)""",
    "connects to a Unix socket": """
def connect(): s = socket.socket(1, 1); s.connect(path); return s.recv(10)
tried(connect)""",
    "connects to an abstract socket": """
def connect(): s = socket.socket(1, 1); s.connect('\\0' + abstract); return s.recv(10)
tried(connect)""",
    "sends to a Unix datagram socket without connecting": """
def send():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    a.sendto(b'x', path + '.datagrams')
tried(send)""",
    "opens raw sockets": """
for family in (2, 10, 16, 17, 38, 40): tried(socket.socket, family, 3, 0)""",
    "asks for pairs of sockets that can be sent anywhere": """
for kind in (2, 3, 5, 2 | 0x80000, 5 | 0x800): tried(socket.socketpair, 1, kind)
a, b = socket.socketpair()
a.sendall(b'x')
if b.recv(1) != b'x': escaped('a pair that does not work')
tried(a.sendto, b'x', path)
tried(a.sendmsg, [b'x'], [], 0, path)
tried(a.bind, '\\0' + abstract + 'x')
tried(b.connect, path)""",
    "listens": "tried(lambda: socket.socket().bind(('0.0.0.0', 0)))",
    "looks a name up": "tried(socket.getaddrinfo, 'example.com', 80)",
    "uses bash's network": """
done = subprocess.run(['bash', '-c', f'echo x > /dev/tcp/127.0.0.1/{port}'])
if done.returncode == 0: escaped()""",
    "asks for io_uring": "refused(425, 8, bytes(120))",
}
PROCESSES = {
    "kills a process": "tried(os.kill, victim, 9)",
    "stops a process": "tried(os.kill, victim, signal.SIGSTOP)",
    "kills a thread": """
number = 200 if os.uname().machine == 'x86_64' else 130
if libc.syscall(number, victim, 9) >= 0: escaped()""",
    "kills everything": """
signal.signal(15, signal.SIG_IGN)
try: os.kill(-1, 15)
except OSError: pass
try: os.kill(-1, 9)
except OSError: pass""",
    "kills groups": """
for group in range(1, 40000):
    try: os.killpg(group, 0)
    except OSError: continue
    if group not in (os.getpgrp(), os.getppid(), 1): escaped(group)""",
    "kills its parents": """
try: os.kill(os.getppid(), 9)
except OSError: pass
time.sleep(0.2)""",
    "stops its parents": """
try: os.kill(os.getppid(), signal.SIGSTOP)
except OSError: pass
time.sleep(60)""",
    "traces": """
number = 101 if os.uname().machine == 'x86_64' else 117
refused(number, 16, victim, 0, 0); refused(number, 16, os.getppid(), 0, 0)""",
    "reads another's memory": """
number = 310 if os.uname().machine == 'x86_64' else 270
buffer = bytes(64); at = struct.pack('QQ', id(buffer), 8)
for process in (victim, os.getppid()): refused(number, process, at, 1, at, 1, 0)
tried(lambda: open(f'/proc/{os.getppid()}/mem', 'rb+'))
tried(lambda: open(f'/proc/{victim}/mem', 'rb+'))
tried(lambda: open(f'/proc/{os.getppid()}/maps').read(1))""",
    "takes another's files": """
for process in (victim, os.getppid()):
    try: handle = os.pidfd_open(process)
    except (OSError, AttributeError): continue
    for number in range(8):
        if libc.syscall(438, handle, number, 0) >= 0: escaped()
for number in range(40):
    tried(os.open, f'/proc/{os.getppid()}/fd/{number}', os.O_RDWR)""",
    "writes to every descriptor": """
for number in range(3, 64):
    try: os.write(number, b'\\0' * 24)
    except OSError: pass""",
    "closes every descriptor": "os.closerange(0, 64)",
    "raises its limits": """
for kind in range(16):
    soft, hard = resource.getrlimit(kind)
    if hard == -1: continue
    tried(resource.setrlimit, kind, (hard + 1, hard + 1))""",
    "asks for priority": """
tried(os.nice, -5)
tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1))""",
    "makes namespaces": """
for flag in (0x10000000, 0x20000, 0x40000000, 0x20000000, 0x8000000, 0x2000000, 0x80):
    refused(272 if os.uname().machine == 'x86_64' else 97, flag)
    number = 56 if os.uname().machine == 'x86_64' else 220
    child = libc.syscall(number, flag | 17, 0, 0, 0, 0)
    if child == 0: os._exit(0)
    if child > 0: escaped(hex(flag))
refused(435, bytes(88), 88)
for name in ('user', 'mnt', 'net', 'pid'):
    for process in (1, os.getppid()):
        try: at = os.open(f'/proc/{process}/ns/{name}', os.O_RDONLY)
        except OSError: continue
        refused(308 if os.uname().machine == 'x86_64' else 268, at, 0)""",
    "becomes root": """
for become in (os.setuid, os.seteuid, os.setgid):
    if os.getuid(): tried(become, 0)
for program in (['su', '-c', 'id'], ['sudo', '-n', 'id'], ['mount'], ['newgrp']):
    try: done = subprocess.run(program, capture_output=True, timeout=1)
    except (OSError, subprocess.TimeoutExpired): continue
    if b'uid=0' in done.stdout: escaped(program)""",
    "asks for dangerous calls": """
x86 = os.uname().machine == 'x86_64'
for number in ((321, 298, 323, 250, 248, 246, 175, 313, 169, 167, 163, 170, 103, 312)
               if x86 else (280, 241, 282, 219, 217, 104, 105, 273, 142, 224, 89)):
    refused(number, 0, 0, 0, 0, 0)""",
    "asks for calls of the future": """
for number in (453, 461, 470, 500, 999): refused(number, 0, 0, 0)""",
    "uses 32-bit calls": """
if os.uname().machine == 'x86_64':
    refused(0x40000000 + 39)""",
    "runs a file without a name": "tried(lambda: os.memfd_create('x'))",
    "hides daemons": """
for _ in range(5):
    if os.fork() == 0:
        try: os.setsid()
        except OSError: pass
        if os.fork(): os._exit(0)
        for number in range(1, 60):
            try: signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError): pass
        libc.prctl(1, 0, 0, 0, 0)
        time.sleep(600); os._exit(0)""",
    "ignores signals": """
for number in range(1, 60):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass""",
    "becomes another program": "os.execv('/bin/sleep', ['sleep', '600'])",
    "injects into terminals": """
import fcntl
for number in (0, 1, 2):
    try: fcntl.ioctl(number, 0x5412, b'x')
    except OSError: continue
    escaped(number)""",
}
RESOURCES = {
    "forks": """
while True:
    try: os.fork()
    except OSError: pass""",
    "forks in a shell": """
subprocess.run(['sh', '-c', 'f() { f | f & }; f; sleep 1; f'])
time.sleep(600)""",
    "forks and leaves": """
while True:
    try:
        if os.fork(): os._exit(0)
    except OSError: pass""",
    "starts threads": """
while True:
    try: threading.Thread(target=time.sleep, args=(600,)).start()
    except RuntimeError: time.sleep(0.01)""",
    "takes memory": "x = bytearray(8 << 30); x[::4096] = b'1' * len(x[::4096])",
    "takes memory bit by bit": """
x = []
while True: x.append(bytearray(b'1') * (4 << 20))""",
    "takes memory in many processes": """
for _ in range(10):
    if os.fork() == 0: break
x = bytearray(b'1') * (250 << 20)
time.sleep(600)""",
    "takes shared memory": """
import mmap
maps = []
for _ in range(10):
    m = mmap.mmap(-1, 100 << 20)
    for at in range(0, 100 << 20, 4096): m[at] = 1
    maps.append(m)""",
    "takes System V memory": """
number = 29 if os.uname().machine == 'x86_64' else 194
for _ in range(100): refused(number, 0, 64 << 20, 0o1666)""",
    "fills /dev/shm": """
def fill():
    with open('/dev/shm/x', 'wb') as f: f.write(bytes(200 << 20))
tried(fill)""",
    "fills pairs of sockets": """
pairs = []
for _ in range(12):
    try:
        if os.fork(): continue
        while True:
            a, b = socket.socketpair(); pairs.append((a, b))
            for each in (a, b):
                each.setblocking(False)
                try:
                    while True: each.send(bytes(65536))
                except BlockingIOError: pass
    except OSError: break
time.sleep(600)""",
    "makes the buffers of sockets larger": """
a, b = socket.socketpair()
for option in (7, 8, 32, 33): tried(a.setsockopt, 1, option, 64 << 20)""",
    "makes pipes larger": """
import fcntl
tried(fcntl.fcntl, os.pipe()[1], 1031, 1 << 20)""",
    "watches files": """
x86 = os.uname().machine == 'x86_64'
if x86: refused(253)
refused(294 if x86 else 26, 0); refused(300 if x86 else 262, 0, 0)
watch = libc.inotify_init1(0)
if watch >= 0: escaped(watch)""",
    "rules files": "refused(444, struct.pack('=Q', 1), 8, 0)",
    "queues reads": """
refused(206 if os.uname().machine == 'x86_64' else 0, 9, bytes(8))""",
    "fills pipes": """
pipes = []
while True:
    try:
        r, w = os.pipe(); os.set_blocking(w, False)
        try:
            while True: os.write(w, bytes(65536))
        except BlockingIOError: pass
    except OSError: break""",
    "writes a large file": """
with open('x', 'wb') as f:
    while True: f.write(bytes(1 << 20))""",
    "writes many files": """
try:
    for i in range(1000):
        with open(f'{i}', 'wb') as f: f.write(bytes(4 << 20))
except OSError: time.sleep(0.5)""",
    "writes files without names": """
kept = []
try:
    while True:
        f = open('x', 'wb'); os.unlink('x'); kept.append(f)
        f.write(bytes(4 << 20)); f.flush()
except OSError: time.sleep(0.5)""",
    "makes empty files": """
i = 0
try:
    while True: i += 1; os.close(os.open(f'{i}', os.O_CREAT | os.O_WRONLY))
except OSError: pass""",
    "makes deep folders": """
try:
    for i in range(2500): os.mkdir('d' * 100); os.chdir('d' * 100)
except OSError: pass""",
    "makes closed folders": """
for i in range(20): os.makedirs(f'{i}/a', 0o700); os.mkdir(f'{i}/b', 0)
os.chmod('0', 0)""",
    "names files strangely": """
for name in (b'\\xff\\n', b'-rf', b'*', b' ', b'a' * 255):
    open(name, 'w').close()""",
    "makes a file with a hole": """
with open('x', 'wb') as f: f.truncate(1 << 50)""",
    "prints for ever": "while True: print('x' * 1000)",
    "prints errors for ever": "while True: os.write(2, b'y' * 65536)",
    "prints from a child for ever": """
if os.fork() == 0:
    while True:
        try: os.write(1, b'z' * 65536)
        except OSError: os._exit(0)""",
    "sleeps": "time.sleep(600)",
    "loops": "while True: pass",
    "waits for input": "sys.stdin.read(); os.read(0, 1)",
    "unpacks a bomb": """
import zlib
small = zlib.compress(bytes(100 << 20))
x = b''.join(zlib.decompress(small) for _ in range(100))""",
    "matches for ever": "import re; re.match('(a+)+$', 'a' * 60 + 'b')",
    "counts too far": "x = 10 ** 10 ** 9",
    "expands entities": """
import xml.etree.ElementTree as tree
names = ''.join(f'<!ENTITY a{i+1} "{"&a%d;" % i * 10}">' for i in range(12))
try: tree.fromstring(f'<!DOCTYPE x [<!ENTITY a0 "{"a" * 100}">{names}]><x>&a12;</x>')
except tree.ParseError as error: print(error)""",
    "recurses": """
sys.setrecursionlimit(10 ** 9)
def f(): f()
f()""",
    "reads address 0": "ctypes.string_at(0)",
}
PROGRAMS = FILES | NETWORK | PROCESSES | RESOURCES
