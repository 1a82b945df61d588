"""Fifty defects of saving, resuming and agreement, each planted into a copy of the sources: are they found?

Run `python packages/tests/torture/planted.py [--only NAME]`, for half an hour. Each has its place by its text. The
training of `planted_training.py` meets faults in the copy, by one seed after the other, until it differs from the same
training, with the same defect, without faults; or the kit says that this one saves nothing intact. So only what shows
after a fault is found, or in the files; what needs a power cut to show, such as a sync that is missing, cannot be, nor
what something else repairs, such as the files of an interrupted save, which the next save and start both look for.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from concurrent.futures import ThreadPoolExecutor

from heliograph.packages.tests.mutants import Fault, copy_with, run_in
from heliograph.packages.tests.torture.planted_training import FOUND

SEEDS = {"one": 8, "background": 4, "ranks": 4}  # how many are tried
HOLDS = "the copy has no defect, and the kit finds something"


def defect(name: str, text: str, by: str) -> Fault:
    """Return a defect; its name begins with the program that meets it."""
    return Fault(name, text, by)


DEFECTS = (
    # Saving.
    defect(
        "one: the last bytes of the data are not written",
        "piece, self._piece = self._piece, bytearray()\n        self._append(piece)",
        "self._piece = bytearray()",
    ),
    defect(
        "one: the CRC-32 is not compared",
        "        if checks_data and crc != record.CRC:\n",
        "        if False:\n",
    ),
    defect("one: sequences begin again after a start", "inventory.highest_sequence(files, self.run_name)", "0"),
    defect("one: all checkpoints have one number", "newest + 1 if sequence is None else sequence", "1"),
    defect(
        "one: a failed save is taken for a good one",
        "            raise _failure(files, path, error, consequence) from error\n",
        '            return replace(entry, size=0, sha256="")\n',
    ),
    defect("one: a checkpoint has no manifest", "        writer.end(encode(entry))\n", "        writer.end(b'')\n"),
    defect(
        "one: a checkpoint is removed before its successor has its name",
        "        files.rename(hidden.data, path)\n        files.sync_folder(self.folder)\n",
        "        files.unlink(path)\n        files.rename(hidden.data, path)\n        files.sync_folder(self.folder)\n",
    ),
    defect(
        "one: the newest are removed, not the oldest",
        "[*reversed(self._entries.values())],",
        "[*self._entries.values()],",
    ),
    defect(
        "one: what was there is not counted after a resume",
        "self.retention.begin(self._read_entries(), self.damaged)",
        "self.retention.begin(())",
    ),
    defect(
        "one: by what a checkpoint was judged is not kept",
        '        judged_by=_judged_by(facts["judged_by"]),\n',
        "",
    ),
    defect(
        "background: the live state is written",
        "return self._buffers.copy(state) if run.engine.is_main else state",
        "return state",
    ),
    defect(
        "background: tensors of one size share a buffer",
        "        taken[size] = used + 1\n        return buffers[used]\n",
        "        taken[size] = max(used, 1)\n        return buffers[0]\n",
    ),
    # The snapshot.
    defect("one: no optimizers are saved", '        "optimizers": optimizers,\n', '        "optimizers": {},\n'),
    defect("one: no means are saved", '        "means": run.means.state_dict(),\n', '        "means": {},\n'),
    defect("one: no metrics are restored", '    run.metrics.update(saved["metrics"])\n', ""),
    defect(
        "one: an epoch begins again",
        'run.work.has_begun = saved.get("epoch_begun", run.progress.batch > 0)',
        "run.work.has_begun = False",
    ),
    defect(
        "one: a boundary is not finished",
        'run.checkpoints.in_boundary = saved.get("at_save_point", False)',
        "run.checkpoints.in_boundary = False",
    ),
    defect(
        "one: requests that are due are not saved",
        'state = {"due": sorted(due), "postponed": sorted(self._postponed)',
        'state = {"due": [], "postponed": []',
    ),
    defect(
        "one: no schedulers are saved",
        '"schedulers": {name: scheduler.state_dict() for name, scheduler in run.schedulers.items()},',
        '"schedulers": {name: {} for name in run.schedulers},',
    ),
    defect("one: schedulers are not restored", "        if before.get(name) == now[name]:\n", "        if False:\n"),
    defect(
        "one: a task's own state is not restored",
        '        run.task.load_state_dict(deepcopy(saved["task"]["task"]))\n',
        "        pass\n",
    ),
    defect(
        "one: plugins get no state",
        "            if state:\n                self._load_state(",
        "            if False:\n                self._load_state(",
    ),
    defect(
        "one: filters begin again",
        'run.plugins.load_filter_states(run.origin, saved.get("filters", {}))',
        "run.plugins.load_filter_states(run.origin, {})",
    ),
    defect(
        "one: attributes are not restored",
        "restored, failed = restore(roots, graph, paths)",
        "restored, failed = restore(roots, graph, ())",
    ),
    defect(
        "one: emissions are not saved",
        '"due": self._due, "emissions": self._emissions}',
        '"due": self._due, "emissions": 0}',
    ),
    defect(
        "one: attributes are not saved",
        "{} if object_state is None else object_state.state_dict(run)",
        "{}",
    ),
    defect(
        "one: samples are not restored",
        "        for name, value in counters.items():\n            setattr(self, name, value)\n",
        "        for name, value in counters.items():\n"
        '            setattr(self, name, 0 if name == "samples" else value)\n',
    ),
    defect(
        "one: optimizers are not restored",
        '(run.modules, optimizers, (saved["modules"], saved["optimizers"]))',
        '(run.modules, {}, (saved["modules"], {}))',
    ),
    defect(
        "one: an older checkpoint is resumed",
        "return sorted(of_run, key=lambda entry: entry.order, reverse=True), passed_over",
        "return sorted(of_run, key=lambda entry: entry.order), passed_over",
    ),
    # Random numbers.
    defect("one: python's generator is not restored", '    random.setstate(_unpacked(state["python"]))\n', ""),
    defect("one: NumPy's generator is not restored", '    np.random.set_state(_from_plain(state["numpy"]))\n', ""),
    defect("one: torch's generator is not restored", '    torch.set_rng_state(_tensor(state["torch"]))\n', ""),
    defect(
        "one: the private generator is not restored",
        '            rng.set_generator_state(self._generator, state["generator"])\n',
        "            pass\n",
    ),
    defect(
        "one: generators of the task are not restored",
        "            rng.set_generator_state(generator, task_state)\n",
        "            pass\n",
    ),
    defect(
        "one: states of generators are read and forgotten",
        "self._saved = None if self._is_new else state or None",
        "self._saved = None",
    ),
    # The data.
    defect(
        "one: a resumed epoch begins at its first batch",
        "self.seed, self.epoch, self.batch = seed, epoch, batch",
        "self.seed, self.epoch, self.batch = seed, epoch, 0",
    ),
    defect(
        "one: a resumed epoch begins a batch late",
        "self.seed, self.epoch, self.batch = seed, epoch, batch",
        "self.seed, self.epoch, self.batch = seed, epoch, batch + (batch > 0)",
    ),
    # Plugins.
    defect(
        "one: an average begins again",
        'self._updates, self._steps = dict(state.get("updates", {})), dict(state.get("steps", {}))\n',
        "self._updates, self._steps = {}, {}\n",
    ),
    defect(
        "one: an average is not restored",
        'self.weights = {name: dict(weights) for name, weights in state.get("weights", {}).items()}',
        "pass",
    ),
    defect(
        "one: patience begins again",
        'self.best, self.failed_readings = state["best"], state["failed_readings"]',
        'self.best, self.failed_readings = state["best"], 0',
    ),
    defect(
        "one: the best of a patience is forgotten",
        'self.best, self.failed_readings = state["best"], state["failed_readings"]',
        'self.best, self.failed_readings = None, state["failed_readings"]',
    ),
    defect(
        "one: a state is loaded from another plugin",
        "state = states.get(entry.name)",
        "state = states.get(next(iter(states)))",
    ),
    defect(
        "one: a notice is received and forgotten",
        "            self._ask(run, self._received, saves=not is_saved)\n",
        "            pass\n",
    ),
    # Several ranks.
    defect(
        "ranks: what differs on a rank is not saved",
        "    parts: list[dict[Key, Any]] = engine.gather_objects(differing)\n",
        "    parts: list[dict[Key, Any]] = engine.gather_objects({})\n",
    ),
    defect(
        "ranks: each rank continues as the main one",
        "ranks[rank] if rank < len(ranks) else",
        "ranks[0] if rank < len(ranks) else",
    ),
    defect(
        "ranks: only the main rank is asked",
        "    for rank, ballot in enumerate(ballots):\n        for key, request in ballot.requests.items():\n",
        "    for rank, ballot in enumerate(ballots[:1]):\n        for key, request in ballot.requests.items():\n",
    ),
    defect(
        "ranks: a rank does not wait for the others",
        "if settles or all(SUMMARY.unpack(summary)[0] for summary in self._open[-1]):",
        "if settles or any(SUMMARY.unpack(summary)[0] for summary in self._open[-1]):",
    ),
    defect(
        "ranks: what a rank asks for is no news",
        "return bool(singles or self._due or self._interrupted or self._withdrawn or self._save_veto)",
        "return bool(self._interrupted or self._withdrawn or self._save_veto)",
    ),
    defect(
        "ranks: plugins of all ranks get the state of the main one",
        'BY_NAME = ("progress", "plugins", "plugin_versions", "number_types")',
        'BY_NAME = ("progress", "plugin_versions", "number_types")',
    ),
    defect(
        "ranks: the state is read by the main rank only",
        "            state = share_state(run.engine, path, None if point is None else point.state)\n",
        "            state = run.state_dict() if point is None or point.state is None else point.state\n",
    ),
)


def main() -> None:
    """Print for each defect what has found it; the status is 1 where more than one in twenty is missed.

    Where all of them are tried, the training runs without a defect first.
    """
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="the defects whose names contain this, at once")
    parser.add_argument("--jobs", type=int, default=2, help="copies at a time (%(default)s)")
    options = parser.parse_args()
    chosen = [each for each in DEFECTS if options.only in each.name]
    missed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        programs = [] if options.only else list(dict.fromkeys(map(program_of, DEFECTS)))
        for program, found in zip(programs, pool.map(lambda each: finding(None, each), programs), strict=True):
            if found is not None:
                sys.exit(f"{HOLDS}: {program}: {found}")
            print(f"nothing {program}: without a defect", flush=True)
        for each, found in zip(chosen, pool.map(lambda each: finding(each, program_of(each)), chosen), strict=True):
            missed += found is None
            print(f"MISSED  {each.name}" if found is None else f"found   {each.name}: {found}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    sys.exit(missed * 20 > len(chosen))


def program_of(each: Fault) -> str:
    """Return the program that meets a defect."""
    return each.name.partition(":")[0]


def finding(each: Fault | None, program: str) -> str | None:
    """Return what the kit says of a copy of the sources with a defect, None where it finds nothing.

    Raises:
        ValueError: the text of the defect is not there once.
        RuntimeError: the kit itself failed.
    """
    with copy_with(each) as copy:
        for seed in range(SEEDS[program]):
            done = run_in(
                copy, [sys.executable, str(copy / "packages/tests/torture/planted_training.py"), program, str(seed)]
            )
            if done.returncode == FOUND:
                return f"seed {seed}: {done.stdout.strip().splitlines()[-1][:200]}"
            if done.returncode:
                raise RuntimeError(f"The kit itself failed, with seed {seed}:\n{done.stdout}{done.stderr}")
    return None


if __name__ == "__main__":
    main()
