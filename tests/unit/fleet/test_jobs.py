"""Jobs from files: what they may say, what is refused, and what makes their code the same."""

import pytest

from shoestring.errors import FleetError
from shoestring.fleet.jobs import Job, read_jobs


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("print('training')\n")
    return path


def write(tmp_path, text, name="job.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_one_job_takes_the_files_name(tmp_path, script):
    (job,) = read_jobs(write(tmp_path, 'script = "train.py"\nsteps = 7\nbatches = 8\n', "small.toml"))
    assert job == Job("small", str(script), batches=(8,), steps=7)


def test_several_jobs_in_one_file(tmp_path, script):
    path = write(
        tmp_path,
        """
        [[job]]
        name = "a"
        script = "train.py"
        arguments = ["--batch", "{batch}"]
        batches = [16, 32]
        epochs = 2.5
        samples = 100
        priority = 2
        deadline_s = 60
        devices = 2
        kinds = ["h200"]
        every = 5
        [[job]]
        name = "b"
        script = "train.py"
        steps = 1
        """,
    )
    a, b = read_jobs(path)
    assert a == Job(
        "a", str(script), ("--batch", "{batch}"), (16, 32), 0, 2.5, 100, 2.0, 60.0, 2, ("h200",), 5
    )  # fmt: skip
    assert b.name == "b"
    assert a.command(16) == [str(script), "--batch", "16"]
    assert a.total_steps(16) == 15  # 2.5 epochs of 6 whole batches
    assert Job.from_json(a.to_json()) == a


def test_a_python_file_computes_its_jobs(tmp_path, script):
    path = write(
        tmp_path,
        "from shoestring.fleet.jobs import Job\njobs = [Job(f'j{n}', 'train.py', steps=n) for n in (1, 2)]\n",
        "jobs.py",
    )
    assert [(job.name, job.steps, job.script) for job in read_jobs(path)] == [
        ("j1", 1, str(script)),
        ("j2", 2, str(script)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("script = ", "is not TOML"),
        ('script = "train.py"', "must say how long it is in one way"),
        ('script = "train.py"\nsteps = 1\nepochs = 1\nsamples = 9', "must say how long it is in one way"),
        ('script = "train.py"\nepochs = 1', "must say how long it is in one way"),
        ('script = "train.py"\nsteps = -1', "must say how long"),
        ('script = "other.py"\nsteps = 1', "names a script"),
        ('script = "train.py"\nsteps = 1\nbatches = []', "has batch sizes"),
        ('script = "train.py"\nsteps = 1\nbatches = [0]', "has batch sizes"),
        ('script = "train.py"\nsteps = 1\nbatch = 4', "says `batch`, which a job does not have"),
        ('script = "train.py"\nsteps = "many"', "is no job"),
        ('script = "train.py"\nsteps = 1\npriority = 0', "priority 0"),
        ('script = "train.py"\nsteps = 1\npriority = nan', "priority nan"),
        ('script = "train.py"\nsteps = 1\ndevices = 0', "asks for 0 devices"),
        ('script = "train.py"\nsteps = 1\ndeadline_s = -5', "deadline of -5"),
        ('script = "train.py"\nsteps = 1\nname = "../x"', "cannot be called `../x`"),
        ('[[job]]\nname="a"\nscript = "train.py"\nsteps = 1\n' * 2, "two jobs of one name"),
        ('steps = 1\n[[job]]\nname="a"\nscript = "train.py"\nsteps = 1', "and other keys: steps"),
    ],
)
def test_what_is_no_job_is_refused(tmp_path, script, text, message):
    with pytest.raises(FleetError, match=message):
        read_jobs(write(tmp_path, text))


@pytest.mark.parametrize("text", ["", "job = 3", "jobs = []", "jobs = [1]"])
def test_a_python_file_without_jobs_is_refused(tmp_path, text):
    with pytest.raises(FleetError, match="defines no job"):
        read_jobs(write(tmp_path, text, "jobs.py"))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(FleetError, match="there is no job file"):
        read_jobs(tmp_path / "none.toml")


def test_the_key_follows_the_code_and_the_arguments(tmp_path, script):
    job = Job("a", str(script), ("--lr", "1"), steps=10)
    key = job.key()
    assert key == Job("b", str(script), ("--lr", "1"), steps=99, priority=5).key()
    assert key != Job("a", str(script), ("--lr", "2"), steps=10).key()
    model = write(tmp_path, "x = 1", "model.py")  # it may be imported
    changed = job.key()
    assert changed != key
    model.unlink()
    assert job.key() == key
    script.write_text("print('else')\n")
    assert job.key() != key
    script.unlink()
    with pytest.raises(FleetError, match="cannot be read"):
        job.key()
