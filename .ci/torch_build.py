"""Says which build of torch `make install` is about to take, how large it is, and how to choose another."""

import json
import os
import subprocess
import sys
import urllib.parse
import urllib.request

requirement = sys.argv[1]
command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
command += ["--no-deps", "--ignore-installed", "--report", "-", *requirement.split()]
found = subprocess.run(command, capture_output=True, text=True)
if found.returncode:
    sys.exit(f"install: pip finds no {requirement}: {found.stderr.strip().splitlines()[-1]}")
item = json.loads(found.stdout)["install"][0]
address = urllib.parse.urlparse(item["download_info"]["url"])
try:
    if address.scheme == "file":
        size = os.path.getsize(urllib.request.url2pathname(address.path))
    else:
        head = urllib.request.Request(address.geturl(), method="HEAD")
        size = int(urllib.request.urlopen(head, timeout=10).headers["Content-Length"])
    size_text = f"{size / 1e6:.0f} MB"
except (OSError, KeyError, TypeError, ValueError):
    size_text = "size unknown"
needs = [need for need in item["metadata"].get("requires_dist", []) if need.startswith(("nvidia-", "cuda-"))]
kind = "a CUDA build, which brings several GB of libraries" if needs else "a CPU build"
version = item["metadata"]["version"]
print(f"install: torch {version}, {kind} (the file: {size_text}); everything else is about 500 MB.")
print("install: another build: make install TORCH='torch==2.13.0 --index-url ADDRESS-OF-THAT-BUILD'")
