"""What a program in a response may try to reach. Every line must fail: it raises, or an `assert` shows no effect.

The names in capitals are of the host: VICTIM, a process of the same user; FILE and FOLDER, of that user; PORT, UNIX and
ABSTRACT, addresses of servers; PYTHON, the interpreter. `call(name, *arguments)` is the system call of that name.
"""

NETWORK = {
    "tcp": "socket.create_connection(('127.0.0.1', PORT), 1)",
    "tcp6": "socket.socket(socket.AF_INET6, socket.SOCK_STREAM)",
    "tcp server": "socket.create_server(('127.0.0.1', 0))",
    "udp": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', UDP))",
    "unix": "socket.socket(socket.AF_UNIX).connect(UNIX)",
    "unix datagram": "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b'x', UNIX)",
    "abstract unix": "socket.socket(socket.AF_UNIX).connect(ABSTRACT)",
    "datagram of a pair to another address": "pair(socket.SOCK_DGRAM).sendto(b'x', UNIX)",
    "message of a pair to another address": "pair(socket.SOCK_DGRAM).sendmsg([b'x'], [], 0, ABSTRACT)",
    "connect of a pair": "pair(socket.SOCK_DGRAM).connect(ABSTRACT)",
    "bind of a pair": "pair(socket.SOCK_DGRAM).bind('mine')",
    "descriptors in messages": "socket.send_fds(pair(), [b'x'], [0])",
    "large buffers": "pair().setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24)",
    "forced buffers": "pair().setsockopt(socket.SOL_SOCKET, 32, 1 << 24)",
    "netlink": "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "raw": "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "ping": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM, 1)",
    "packet": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "vsock": "socket.socket(40, socket.SOCK_STREAM).connect((2, 1))",
    "bluetooth": "socket.socket(31, socket.SOCK_RAW, 1)",
    "kernel crypto": "socket.socket(38, socket.SOCK_SEQPACKET)",
    "xdp": "socket.socket(44, socket.SOCK_RAW)",
    "tipc": "socket.socket(30, socket.SOCK_RDM)",
    "inet pair": "socket.socketpair(socket.AF_INET)",
    "name resolution": "socket.getaddrinfo('example.com', 80)",
    "io_uring": "call('io_uring_setup', 8, bytearray(256))",
    "socket by number": "call('socket', 2, 2, 0)",
    "multipath tcp": "socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)",
    "sctp": "socket.socket(socket.AF_INET, socket.SOCK_SEQPACKET, 132)",
    **{f"family {n}": f"socket.socket({n}, socket.SOCK_DGRAM)" for n in (21, 27, 29, 39, 42, 43)},
    "listen": "call('listen', 0, 1)",
    "accept": "call('accept4', 0, 0, 0, 0)",
    "many messages": "call('sendmmsg', 1, bytearray(64), 1, 0)",
    **{
        f"{name} of the host": f"assert len(open('/proc/{folder}/net/{name}').read().splitlines()) > 1"
        for name in ("tcp", "unix", "udp", "route")
        for folder in ("self",)
    },
    "connections by a thread": "assert len(open(f'/proc/self/task/{os.getpid()}/net/unix').readlines()) > 1",
    "connections of the trainer": "open(f'/proc/{TRAINER}/net/tcp').read()",
}
PROCESSES = {
    "signal 0": "os.kill(VICTIM, 0)",
    "SIGKILL": "os.kill(VICTIM, 9)",
    "SIGSTOP": "os.kill(VICTIM, signal.SIGSTOP)",
    "the group": "os.killpg(VICTIM, 9)",
    "tgkill": "call('tgkill', VICTIM, VICTIM, 9)",
    "tkill": "call('tkill', VICTIM, 9)",
    "rt_sigqueueinfo": "call('rt_sigqueueinfo', VICTIM, 9, bytearray(128))",
    "pidfd_open": "os.pidfd_open(VICTIM)",
    "pidfd of oneself": "os.pidfd_open(os.getpid())",
    "pidfd_getfd": "call('pidfd_getfd', 0, 0, 0)",
    "pidfd_send_signal": "call('pidfd_send_signal', 0, 9, 0, 0)",
    "SIGIO": "fcntl.fcntl(0, fcntl.F_SETOWN, VICTIM)",
    "another signal for SIGIO": "fcntl.fcntl(0, fcntl.F_SETSIG, 9)",
    "owner by ioctl": "fcntl.ioctl(pair(), 0x8901, bytearray(VICTIM.to_bytes(4, 'little')))",
    "lease": "fcntl.fcntl(open('mine', 'w'), fcntl.F_SETLEASE, fcntl.F_WRLCK)",
    "prlimit of another process": "resource.prlimit(VICTIM, resource.RLIMIT_CPU, (1, 1))",
    "prlimit of the trainer": "resource.prlimit(TRAINER, resource.RLIMIT_NOFILE, (64, 64))",
    "prlimit of the parent": "resource.prlimit(os.getppid(), resource.RLIMIT_FSIZE, (0, 0))",
    "prlimit with high bits": "call('prlimit64', (1 << 32) + VICTIM, 7, bytearray(16), 0)",
    "read limits": "resource.prlimit(VICTIM, resource.RLIMIT_CPU)",
    "a higher own limit": "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
    "priority": "os.setpriority(os.PRIO_PROCESS, VICTIM, 19)",
    "priority of the user": "os.setpriority(os.PRIO_USER, os.getuid(), 19)",
    "a better own priority": "os.nice(-5)",
    "real-time priority": "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
    "idle scheduling": "os.sched_setscheduler(VICTIM, os.SCHED_IDLE, os.sched_param(0))",
    "sched_setattr": "call('sched_setattr', 0, bytearray(56), 0)",
    "processors": "os.sched_setaffinity(VICTIM, {0})",
    "input and output priority": "call('ioprio_set', 1, VICTIM, 24583)",
    "migrate_pages": "call('migrate_pages', VICTIM, 64, bytearray(8), bytearray(8))",
    "move_pages": "call('move_pages', VICTIM, 0, 0, 0, 0, 0)",
    "process_madvise": "call('process_madvise', 0, 0, 0, 0, 0)",
    "process_mrelease": "call('process_mrelease', 0, 0)",
    "kcmp": "call('kcmp', VICTIM, os.getpid(), 0, 0, 0)",
    "get_robust_list": "call('get_robust_list', VICTIM, bytearray(8), bytearray(8))",
    "ptrace": "call('ptrace', 16, VICTIM, 0, 0)",
    "ptrace seize": "call('ptrace', 0x4206, VICTIM, 0, 0)",
    "traced by the parent": "call('ptrace', 0, 0, 0, 0)",
    "process_vm_readv": "call('process_vm_readv', VICTIM, bytearray(16), 1, bytearray(16), 1, 0)",
    "process_vm_writev": "call('process_vm_writev', VICTIM, bytearray(16), 1, bytearray(16), 1, 0)",
    **{
        f"/proc/{name}": f"os.open(f'/proc/{{VICTIM}}/{name}', os.O_RDONLY)"
        for name in ("mem", "environ", "cmdline", "maps", "stat", "syscall", "stack", "fd", "root", "task", "ns/net")
    },
    "memory of the trainer": "open(f'/proc/{TRAINER}/mem', 'r+b')",
    "out-of-memory score": "write(f'/proc/{VICTIM}/oom_score_adj', b'1000')",
    "a lower own score": "write('/proc/self/oom_score_adj', b'-1000')",
    "a group of others": "os.setpgid(0, VICTIM)",
    "a session": "os.setsid()",
    "adopting orphans": "prctl(36, 1)",
    "not dumpable": "prctl(4, 0)",
    "tracer": "prctl(0x59616d61, VICTIM)",
    "map of the memory": "prctl(35, 1, 0)",
    "its memory by its file": "open('/proc/self/mem', 'r+b')",
    "thread with files of its own": "call('clone', 0x10B00, 0, 0, 0, 0)",
    "files of its own": "call('close_range', 1 << 20, (1 << 32) - 1, 2)",
    "processor time of the trainer": "time.clock_gettime((~TRAINER << 3) | 2)",
    "timer on a clock of the trainer": "call('timer_create', (~TRAINER << 3) | 2, 0, bytearray(8))",
    "owner for SIGIO": "fcntl.fcntl(0, 15, bytes(8))",
    "changes of a folder": "fcntl.fcntl(os.open('.', os.O_RDONLY), fcntl.F_NOTIFY, 2)",
    "seals": "fcntl.fcntl(0, 1033, 1)",
    "terminal input": "fcntl.ioctl(0, 0x5412, b'x')",
    "a terminal": "fcntl.ioctl(0, 0x540E, 0)",
    "console": "fcntl.ioctl(0, 0x541C, b'x')",
    "core dumps": "resource.setrlimit(resource.RLIMIT_CORE, (1 << 20, 1 << 20))",
    "more open files": "resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))",
    "more processes": "resource.setrlimit(resource.RLIMIT_NPROC, (-1, -1))",
    "name of the trainer": "write(f'/proc/{TRAINER}/comm', b'x')",
    "environment of process 1": "assert b'SECRET' in open('/proc/1/environ', 'rb').read()",
    "memory of process 1": "open('/proc/1/mem', 'r+b')",
    "files by process 1": "os.listdir('/proc/1/root' + FOLDER)",
    **{
        f"write to {name} of oneself": f"write('/proc/self/{name}', b'1')"
        for name in ("clear_refs", "coredump_filter", "timerslack_ns", "loginuid", "uid_map", "setgroups", "autogroup")
    },
    "secure bits": "prctl(28, 0)",
    "ambient capabilities": "prctl(47, 2, 21)",
}
FILES = {
    "read": "open(FILE).read()",
    "list": "os.listdir(FOLDER)",
    "append": "open(FILE, 'a').write('x')",
    "overwrite": "open(FILE, 'r+').write('x')",
    "create": "open(FOLDER + '/new', 'w')",
    "remove": "os.remove(FILE)",
    "rename": "os.rename(FILE, 'mine')",
    "replace": "open('mine', 'w'); os.replace('mine', FILE)",
    "exchange": "open('mine', 'w'); call('renameat2', -100, b'mine', -100, FILE.encode(), 2)",
    "hard link": "os.link(FILE, 'link')",
    "hard link to outside": "open('mine', 'w'); os.link('mine', FOLDER + '/link')",
    "symbolic link to read": "os.symlink(FILE, 'link1'); open('link1').read()",
    "symbolic link to write": "os.symlink(FILE, 'link2'); open('link2', 'a').write('x')",
    "symbolic link outside": "os.symlink('x', FOLDER + '/link')",
    "truncate": "os.truncate(FILE, 0)",
    "temporary file without a name": "os.open(FOLDER, os.O_TMPFILE | os.O_WRONLY)",
    "folder": "os.mkdir(FOLDER + '/new')",
    "remove a folder": "os.rmdir(FOLDER + '/empty')",
    "fifo outside": "os.mkfifo(FOLDER + '/fifo')",
    "socket file": "os.mknod('node', 0o140600)",
    "character device": "os.mknod('node', 0o20600, os.makedev(1, 1))",
    "block device": "os.mknod('node', 0o60600, os.makedev(254, 0))",
    "mode": "os.chmod(FILE, 0o777); assert os.stat(FILE).st_mode & 0o777 == 0o777",
    "mode of the interpreter": "os.chmod(PYTHON, 0o777); assert os.stat(PYTHON).st_mode & 0o777 == 0o777",
    "mode by a descriptor": "os.fchmod(os.open(FILE, os.O_RDONLY), 0o777)",
    "mode by fchmodat2": "call('fchmodat2', -100, FILE.encode(), 0o777, 0)",
    "owner": "os.chown(FILE, 1, 1)",
    "owner of a link": "os.lchown(FILE, 1, 1)",
    "times": "os.utime(FILE, (1, 1)); assert os.stat(FILE).st_mtime == 1",
    "times of the interpreter": "os.utime(PYTHON, (1, 1)); assert os.stat(PYTHON).st_mtime == 1",
    "attribute": "os.setxattr(FILE, 'user.x', b'x')",
    "attribute of the interpreter": "os.setxattr(PYTHON, 'user.x', b'x')",
    "attribute removed": "os.removexattr(FILE, 'user.kept')",
    "flags": "fcntl.ioctl(os.open(PYTHON, os.O_RDONLY), 0x40086602, bytearray(8))",
    "attributes read": "os.listxattr(FILE)",
    "attributes of the interpreter read": "os.listxattr(PYTHON)",
    "by the root of the process": "open('/proc/self/root' + FILE).read()",
    "by a folder": "os.open('file', os.O_RDONLY, dir_fd=os.open(FOLDER, os.O_PATH))",
    "by the path of a descriptor": "os.open(f'/proc/self/fd/{os.open(FILE, os.O_PATH)}', os.O_RDONLY)",
    "execute": "os.execv(FILE, ['x'])",
    "link by a descriptor": "os.link(f'/proc/self/fd/{os.open(FILE, os.O_PATH)}', 'link3', follow_symlinks=True)",
    "copy": "call('copy_file_range', os.open(FILE, os.O_RDONLY), 0, 1, 0, 6, 0)",
    "entropy": "fcntl.ioctl(os.open('/dev/urandom', os.O_RDONLY), 0x40085203, bytearray(16))",
    **{
        f"write to /proc/{name}": f"os.open('/proc/{name}', os.O_WRONLY)"
        for name in (
            *("sys/vm/drop_caches", "sys/vm/overcommit_memory", "sys/kernel/hostname", "sys/fs/mqueue/msg_max"),
            *("pressure/memory", "irq/default_smp_affinity", "sys/kernel/randomize_va_space", "sys/net/core/somaxconn"),
        )
    },
    "write to the interpreter": "open(PYTHON, 'r+b')",
    "write to packages": "import numpy; open(numpy.__file__, 'a')",
    "create in packages": "import numpy; open(os.path.dirname(numpy.__file__) + '/new.py', 'w')",
    "passwords": "open('/etc/shadow').read()",
    "users": "open('/etc/passwd').read()",
    "host names": "open('/etc/hosts').read()",
    "certificates": "open('/etc/ssl/openssl.cnf').read()",
    "write to /etc": "open('/etc/new', 'w')",
    "write to /": "open('/new', 'w')",
    "write to /usr": "open('/usr/new', 'w')",
    "write to /var": "open('/var/tmp/new', 'w')",
    "write to /dev": "open('/dev/new', 'w')",
    "memory device": "open('/dev/mem', 'rb')",
    "kernel log": "open('/dev/kmsg').read(1)",
    "terminal": "open('/dev/tty', 'w')",
    "pseudo terminals": "os.openpty()",
    "fuse": "open('/dev/fuse', 'r+b')",
    "virtual machines": "open('/dev/kvm', 'r+b')",
    "graphics cards": "open('/dev/nvidia0', 'r+b')",
    "kernel settings": "os.open('/proc/sys/kernel/pid_max', os.O_WRONLY)",
    "system requests": "os.open('/proc/sysrq-trigger', os.O_WRONLY)",
    "core pattern": "open('/proc/sys/kernel/core_pattern', 'w')",
    "kernel memory": "open('/proc/kcore', 'rb').read(1)",
    "cgroups": "os.mkdir('/sys/fs/cgroup/mine')",
    "sysfs": "open('/sys/kernel/uevent_helper', 'w')",
    "handle of a file": "call('name_to_handle_at', -100, b'.', bytearray(256), bytearray(8), 0)",
    "file by handle": "call('open_by_handle_at', 0, bytearray(256), 0)",
    "write to stdin": "os.write(0, b'x')",
    "write to stdin by its path": "os.write(os.open('/proc/self/fd/0', os.O_WRONLY), b'x')",
    "truncate stdin": "os.ftruncate(os.open('/proc/self/fd/0', os.O_RDWR), 0)",
    "inherited descriptors": "assert max(OPEN) > 3",
    "environment": "assert [name for name in os.environ if 'SECRET' in name]",
    "environment of the parents": "assert b'SECRET' in open(f'/proc/{os.getppid()}/environ', 'rb').read()",
}
KERNEL = {
    "mount": "call('mount', b'none', b'.', b'tmpfs', 0, 0)",
    "bind mount": "call('mount', b'/', b'.', 0, 4096, 0)",
    "remount": "call('mount', b'none', b'/', 0, 32, 0)",
    "umount": "call('umount2', b'/proc', 2)",
    "pivot_root": "call('pivot_root', b'.', b'.')",
    "chroot": "os.chroot('.')",
    "fsopen": "call('fsopen', b'tmpfs', 0)",
    "open_tree": "call('open_tree', -100, b'.', 1)",
    "move_mount": "call('move_mount', 0, b'', -100, b'.', 4)",
    "mount_setattr": "call('mount_setattr', -100, b'/', 0x8000, bytearray(32), 32)",
    **{f"unshare {flag:#x}": f"call('unshare', {flag})" for flag in (1 << 28, 1 << 17, 1 << 29, 1 << 30, 0x400)},
    "clone of a user namespace": "call('clone', (1 << 28) | 17, 0, 0, 0, 0)",
    "clone of a network namespace": "call('clone', (1 << 30) | 17, 0, 0, 0, 0)",
    "clone of a sibling": "call('clone', 0x8000 | 17, 0, 0, 0, 0)",
    "clone3": "call('clone3', bytearray(88), 88)",
    "setns": "call('setns', os.open('/proc/self/ns/net', os.O_RDONLY), 0)",
    "setns of process 1": "call('setns', os.open('/proc/1/ns/user', os.O_RDONLY), 0)",
    "bpf": "call('bpf', 0, bytearray(72), 72)",
    "perf": "call('perf_event_open', bytearray(112), 0, -1, -1, 0)",
    "userfaultfd": "call('userfaultfd', 1)",
    "add_key": "call('add_key', b'user', b'x', b'x', 1, -3)",
    "request_key": "call('request_key', b'user', b'x', 0, -3)",
    "keyctl": "call('keyctl', 0, -3, 0)",
    "memfd": "os.memfd_create('x')",
    "secret memory": "call('memfd_secret', 0)",
    "shmget": "call('shmget', 0, 1 << 20, 0o1600)",
    "semget": "call('semget', 0, 1, 0o1600)",
    "msgget": "call('msgget', 0, 0o1600)",
    "message queue": "call('mq_open', b'x', 0o102, 0o600, 0)",
    "inotify": "call('inotify_init1', 0)",
    "fanotify": "call('fanotify_init', 0, 0)",
    "asynchronous input": "call('io_setup', 128, bytearray(8))",
    "vmsplice": "call('vmsplice', 1, bytearray(16), 1, 0)",
    "splice": "call('splice', 0, 0, 1, 0, 1, 0)",
    "tee": "call('tee', 0, 1, 1, 0)",
    "fallocate": "os.posix_fallocate(os.open('mine', os.O_CREAT | os.O_WRONLY), 0, 1 << 20)",
    "huge pages": "mmap.mmap(-1, 1 << 21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
    "locked memory": "call('mlockall', 3)",
    "personality": "call('personality', 0x0040000)",
    "local descriptors": "call('modify_ldt', 0, bytearray(16), 16)",
    "another filter": "call('seccomp', 1, 0, 0)",
    "system log": "call('syslog', 3, bytearray(64), 64)",
    "clock": "time.clock_settime(time.CLOCK_REALTIME, time.time())",
    "clock adjustment": "call('clock_adjtime', 0, bytearray(208))",
    "host name": "socket.sethostname('x')",
    "reboot": "call('reboot', 0xfee1dead, 672274793, 0, 0)",
    "swap": "call('swapoff', b'/swap')",
    "quota": "call('quotactl', 0, 0, 0, 0)",
    "accounting": "call('acct', b'x')",
    "module": "call('init_module', bytearray(16), 16, b'')",
    "kernel image": "call('kexec_load', 0, 0, 0, 0)",
    "ports": "call('iopl', 3)",
    "all disks": "call('sync')",
    "the disk of a file": "call('syncfs', 0)",
    "user 0": "os.setuid(0); assert os.getuid() == 0 and os.getresuid() != os.getresuid()",
    "another user": "os.setresuid(1, 1, 1)",
    "groups": "os.setgroups([0])",
    "capabilities": "call('capset', bytearray(8), bytearray(24))",
    **{
        name: f"call('{name}', 0, 0, 0, 0, 0)"
        for name in (
            *("statmount", "listmount", "cachestat", "lsm_set_self_attr", "landlock_create_ruleset", "mbind"),
            *(
                "set_mempolicy",
                "remap_file_pages",
                "swapon",
                "finit_module",
                "delete_module",
                "kexec_file_load",
                "ioperm",
            ),
            *(
                "settimeofday",
                "adjtimex",
                "setdomainname",
                "vhangup",
                "fanotify_mark",
                "quotactl_fd",
                "fspick",
                "fsmount",
            ),
            *(
                "mlock2",
                "shmat",
                "mq_unlink",
                "process_vm_readv",
                "readahead",
                "sync_file_range",
                "setfsuid",
                "setregid",
            ),
        )
    },
    "much shared memory without a file": "mmap.mmap(-1, 1 << 26)",
    "the same with checked flags": "call('mmap', 0, 1 << 26, 3, 0x23, -1, 0)",
    "names of memory": "prctl(0x53564D41, 0, ctypes.addressof(ctypes.create_string_buffer(9999)) & -4096, 4096, b'x')",
    "its mappings by files": "maps = '/proc/self/map_files'; os.open(f'{maps}/{os.listdir(maps)[0]}', os.O_RDONLY)",
    "shared huge pages": "call('mmap', 0, 4096, 3, 0x40021, -1, 0)",
    "shared memory of a device": "mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096)",
    "calls of another architecture": "page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7); "
    "page.write(bytes.fromhex('b814000000cd80c3')); "
    "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()",
    "the x32 variant": "call(0x40000000 + 41, 2, 2, 0)",
}
ATTEMPTS = {
    f"{group}: {name}": code
    for group, table in {"network": NETWORK, "process": PROCESSES, "file": FILES, "kernel": KERNEL}.items()
    for name, code in table.items()
}

#: Runs each attempt in a fork and prints {name: "reached" or the error}.
PROGRAM = """
import ctypes, errno, fcntl, json, mmap, os, resource, signal, socket, sys, time
OPEN = [int(name) for name in os.listdir('/proc/self/fd')]  # 3 lists them
names, NUMBERS, ATTEMPTS = json.load(sys.stdin)
globals().update(names)
ABSTRACT = chr(0) + ABSTRACT
libc = ctypes.CDLL(None, use_errno=True)
def call(name, *arguments):
    number = NUMBERS.get(name, name)
    if not isinstance(number, int) or number < 0:
        raise NotImplementedError(name)  # not a call of this architecture
    holders = [(ctypes.c_char * max(1, len(a))).from_buffer(a) if isinstance(a, bytearray) else a for a in arguments]
    values = [h if isinstance(h, (bytes, ctypes.Array)) else ctypes.c_long(h) for h in holders]
    result = libc.syscall(ctypes.c_long(number), *values)
    if result == 0 and name == 'clone':
        os._exit(0)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
def prctl(*arguments):
    return call('prctl', *arguments, *[0] * (5 - len(arguments)))
def write(path, data):
    os.write(os.open(path, os.O_WRONLY), data)
def pair(kind=socket.SOCK_STREAM):
    return socket.socketpair(socket.AF_UNIX, kind)[0]
results = {}
for name, code in ATTEMPTS.items():
    reads, writes = os.pipe()
    if os.fork() == 0:
        os.close(reads)
        os.mkdir('of attempt ' + str(len(results)))
        os.chdir('of attempt ' + str(len(results)))
        try:
            os.dup2(writes, 3)
            os.closerange(4, 64)
            exec(code)
            os.write(3, b'reached')
        except BaseException as error:
            os.write(3, repr(error).encode()[:200])
        os._exit(0)
    os.close(writes)
    results[name] = os.read(reads, 300).decode() or 'killed'
    os.close(reads)
    os.wait()
print(json.dumps(results))
"""
