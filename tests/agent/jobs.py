"""Scripts that the agents of the tests run. They speak the control file as the library does, without its weight."""

from __future__ import annotations

import os

LAUNCHER = os.environ.get("SPOTKEEPER_TESTS_LAUNCHER", "")  # "zygote", "exec": a real one in all tests (make recovery)

OBEDIENT = '''
"""Trains until told to stop: the library's manners, without torch."""
import os, sys, time
from spotkeeper.train.agent_link.control import Commit, Control, RunResult, RunPhase, AgentRequest, write_result
run = os.environ["SPOTKEEPER_RUN"]
gen = int(os.environ["SPOTKEEPER_GEN"])
leader = os.environ["LOCAL_RANK"] == "0"
control = Control.open(run + "/ctl")
print("hello from", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 10**9
for step in range(1, steps + 1):
    time.sleep(0.02)
    if leader:
        control.state = RunPhase.TRAINING
        control.step_s = 0.02
        control.save_s = 0.05
        control.stepped(step)
    if control.requested is AgentRequest.SAVE and leader:
        control.committed(Commit(gen, step))
        control.answered = control.request_number
    if control.requested is AgentRequest.SAVE_STOP:
        if leader:
            control.committed(Commit(gen, step))
            write_result(run, RunResult("stopped", gen, step, Commit(gen, step)))
        raise SystemExit(0)
if leader:
    write_result(run, RunResult("done", gen, steps, None))
'''

SPOILS = '''
"""Knows nothing of the control file, and does to it what it is told; ends when it is asked to."""
import os, shutil, signal, sys, time
run = os.environ["SPOTKEEPER_RUN"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
if sys.argv[1] == "empties":
    os.truncate(run + "/ctl", 0)
elif sys.argv[1] == "tramples":
    open(run + "/ctl", "wb").write(b"\\xff" * 256)
elif sys.argv[1] == "removes all":
    shutil.rmtree(run)
else:
    os.unlink(run + "/ctl")
    open(run + "/ctl", "w").write("mine")
while True:
    time.sleep(0.1)
'''

STUBBORN = '''
"""Never looks at the control file, ignores SIGTERM, and has a family that tries to stay."""
import multiprocessing, os, signal, subprocess, sys, time
from spotkeeper.train.agent_link.control import Control, RunPhase
signal.signal(signal.SIGTERM, signal.SIG_IGN)
subprocess.Popen(["sleep", "987"], start_new_session=True)
subprocess.Popen(["setsid", "sh", "-c", "sleep 986 & sleep 985"])
subprocess.Popen(["env", "-i", "setsid", "sh", "-c", "setsid sleep 983 & setsid sleep 982 & exit"])
multiprocessing.get_context("fork").Process(target=time.sleep, args=(984,)).start()
control = Control.open(os.environ["SPOTKEEPER_RUN"] + "/ctl")
control.state = RunPhase.TRAINING
control.pid = os.getpid()
control.stepped(1)
open(os.environ["SPOTKEEPER_RUN"] + "/up", "w").close()
while True:
    time.sleep(1)
'''

ENDS = '''
"""Ends as it is told."""
import os, signal, sys
how = sys.argv[1]
print("about to end by", how)  # not flushed: what it said stays, however it ends
if how == "raise":
    raise RuntimeError("on purpose")
if how == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if how == "_exit93":
    os._exit(93)
if how != "return":
    sys.exit(int(how))
'''

GANG = '''
"""Steps with an all-reduce; all ranks leave at the same step."""
import os, time
import torch, torch.distributed as dist
from spotkeeper.train.agent_link.control import Commit, Control, RunResult, RunPhase, AgentRequest, write_result
dist.init_process_group("gloo")
run, gen = os.environ["SPOTKEEPER_RUN"], int(os.environ["SPOTKEEPER_GEN"])
control = Control.open(run + "/ctl")
control.state = RunPhase.TRAINING
step = 0
while True:
    stop = torch.tensor([int(control.requested is AgentRequest.SAVE_STOP)])
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    step += 1
    control.stepped(step)
    if stop.item():
        control.committed(Commit(gen, step))
        write_result(run, RunResult("stopped", gen, step, Commit(gen, step)))
        raise SystemExit(0)
    time.sleep(0.01)
'''

STUCK = '''
"""Rank 0 waits in a collective for rank 1, which a lock in C holds, with the interpreter's own lock in its hands."""
import ctypes, multiprocessing, os, time
import torch, torch.distributed as dist
from spotkeeper.train.agent_link.control import Control, RunPhase
dist.init_process_group("gloo")
run, rank = os.environ["SPOTKEEPER_RUN"], dist.get_rank()
dist.all_reduce(torch.ones(1))

def loads():
    open(f"{run}/loads", "w").close()
    time.sleep(983)

def hangs():
    mutex = ctypes.create_string_buffer(64)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)
    ctypes.PyDLL(None).pthread_mutex_lock(mutex)

if rank == 0:
    control = Control.open(run + "/ctl")
    control.state = RunPhase.TRAINING
    control.step_s = 0.01
    control.stepped(7)
else:
    multiprocessing.get_context("fork").Process(target=loads).start()
    hangs()
dist.all_reduce(torch.ones(1))
'''
