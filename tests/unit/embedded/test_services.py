"""Services that do not come: the error says what they did last."""

from pathlib import Path

import pytest

from tierlog.embedded.ports import LOOPBACK, Ports
from tierlog.embedded.services import EmbeddedServices, ServiceSpec
from tierlog.model.errors import RetryableError


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("print('came so far', flush=True)", "and wrote last: came so far"),
        ("", "and has written nothing to its log"),
    ],
)
async def test_who_never_answers_is_told_with_its_last_words(says: str, told: str, tmp_path: Path):
    (tmp_path / "stuck.py").write_text(f"import time\n{says}\ntime.sleep(60)\n")
    port = Ports(tmp_path / "ports.json").take("stuck", ["http"])["http"]
    spec = ServiceSpec(
        name="stuck",
        module="stuck",
        env={"PYTHONPATH": str(tmp_path)},
        ready_url=f"http://{LOOPBACK}:{port}/readyz",
        start_s_max=2,
    )
    services = EmbeddedServices(run_dir=tmp_path, log_dir=tmp_path)
    with pytest.raises(RetryableError, match=f"not ready after 2 s, {told}"):
        await services.start([spec])
    assert not services.children
