"""For the one who publishes kernels: from one source file, or a finished package, to the Kernel Hub.

    python examples/publish_kernel.py my_rmsnorm.cpp --name fast-norms --repo-id you/fast-norms
    python examples/publish_kernel.py runs/.../packages/gpt2-activation --repo-id you/gpt2-activation --dry-run

Needs a token that may write (`hf auth login`), unless it is a dry run. HF_ENDPOINT chooses another Hub.
"""

import argparse
from pathlib import Path

from autokernel_hf import hub, shipping
from autokernel_hf.check import check

parser = argparse.ArgumentParser()
parser.add_argument("source", type=Path, help="a candidate file, or a package folder")
parser.add_argument("--name", default="my-kernel")
parser.add_argument("--repo-id", required=True)
parser.add_argument("--out", type=Path, default=Path("packages"))
parser.add_argument("--dry-run", action="store_true")
arguments = parser.parse_args()

if arguments.source.is_file():
    (package,) = shipping.export(arguments.source, name=arguments.name, out=arguments.out)
    folder = Path(package.path)
else:
    folder = arguments.source

report = check(str(folder))
if report.problems:
    raise SystemExit("\n".join(report.problems))
print(f"{folder.name} loads as {report.variant}: functions {report.functions}, layers {report.layers}")

published = hub.publish(folder, arguments.repo_id, dry_run=arguments.dry_run)
print(
    f"{len(published.files)} files for {published.url} v{published.version}; loaded back: {published.loaded}"
)
