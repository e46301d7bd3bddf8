#!/usr/bin/env python3
"""Opens the full-scale picture of a plan in headless Chromium: no console message, drawn in time, nothing too wide.

Usage: check.py GGSHARD [OUT]

GGSHARD is the built program, OUT the folder for pages and screenshots (default target/browser). The browser is
$CHROMIUM, or else `chromium` of the PATH.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE = ROOT / "fixtures/container/plan/glm-5-744b-q4_k_m.header.gguf"
MOST_BYTES = 5_000_000
MOST_MILLISECONDS = 2_000
FLAGS = """--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr""".split()
# Runs in a copy of the page once it has loaded, and leaves what it found where --dump-dom shows it.
PROBE = """<script>
addEventListener('load', function () { setTimeout(function () {
  document.body.getBoundingClientRect(); // the layout is part of what is measured
  var nav = performance.getEntriesByType('navigation')[0], cells = document.querySelectorAll('td.c');
  var found = { drawn: document.documentElement.dataset.ready || 'no', cells: cells.length,
    milliseconds: Math.round(performance.now()), load: Math.round(nav.loadEventEnd),
    width: innerWidth, spill: document.documentElement.scrollWidth - document.documentElement.clientWidth };
  cells[40].focus();
  function key(k) { document.activeElement.dispatchEvent(new KeyboardEvent('keydown', { key: k, bubbles: true })); }
  key('ArrowDown'); key('ArrowRight'); key('Enter');
  found.walked = document.activeElement !== cells[40] && document.querySelectorAll('td.pinned').length === 1 ? 'yes' : 'no';
  found.detail = document.querySelector('.detail h3').textContent;
  var text = Object.keys(found).map(function (k) { return k + '=' + found[k]; }).join(' ');
  if (parent === window) document.body.dataset.found = text; else parent.postMessage(text, '*');
}, 0); });
</script>"""
# Chromium's windows are at least 500 pixels wide; a phone's width is that of a frame.
FRAME = """<!DOCTYPE html><title>frame</title><body><script>
addEventListener('message', function (e) {{ document.body.dataset.found = e.data; }});
</script><iframe src="{name}" width="{width}" height="900" style="border:0"></iframe>"""


def browse(page, *flags, anchor=""):
    """Runs the browser on a page and gives its output and what it said on the console."""
    with tempfile.TemporaryDirectory() as profile:
        command = [os.environ.get("CHROMIUM", "chromium"), *FLAGS, f"--user-data-dir={profile}", *flags, page.as_uri() + anchor]
        done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if done.returncode:
        sys.exit(f"the browser failed on {page}: {done.stderr[-2000:]}")
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def read(dom, console):
    """What the probe left in the page."""
    found = re.search(r'data-found="([^"]*)"', dom)
    if not found:
        sys.exit("the page's script did not run to its end: " + "; ".join(console))
    return dict(pair.split("=", 1) for pair in found[1].split(" "))


def main():
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    program = pathlib.Path(sys.argv[1]).resolve()
    out = pathlib.Path(sys.argv[2] if len(sys.argv) == 3 else ROOT / "target/browser").resolve()
    out.mkdir(parents=True, exist_ok=True)
    failures = []
    for profile in ("hf", "vllm-0.32"):
        page = out / f"plan-{profile}.html"
        subprocess.run([program, "plan", SOURCE, "--header-only", "--tp", "8", "--profile", profile, "--html", page],
                       check=True, stdout=subprocess.DEVNULL)
        probe = out / f"probe-{profile}.html"
        probe.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
        for width in (1280, 390):
            framed = out / f"probe-{profile}-{width}.html"
            framed.write_text(FRAME.format(name=probe.name, width=width))
            dom, console = browse(framed, "--window-size=1400,900", "--dump-dom", "--virtual-time-budget=10000")
            found = read(dom, console)
            print(f"{profile} at {width} px: {page.stat().st_size} bytes, {found}")
            problems = list(console)
            if found["drawn"] != "yes" or found["walked"] != "yes" or int(found["cells"]) < 1000 or int(found["width"]) != width:
                problems.append(f"not drawn as it should be: {found}")
            if int(found["spill"]) > 0:
                problems.append(f"{found['spill']} pixels wider than the window")
            failures += [f"{profile} at {width} px: {p}" for p in problems]
        # Once more in real time: under a virtual clock nothing takes long.
        found = read(*browse(probe, "--window-size=1280,900", "--dump-dom", "--timeout=4000"))
        print(f"{profile}: loaded after {found['load']} ms, laid out after {found['milliseconds']} ms")
        if int(found["milliseconds"]) > MOST_MILLISECONDS:
            failures.append(f"{profile}: drawn after {found['milliseconds']} ms")
        if page.stat().st_size > MOST_BYTES:
            failures.append(f"{profile}: {page.stat().st_size} bytes")
        for scheme in ("light", "dark"):
            for name, size in (("wide", "1280,2600"), ("phone", "390,2600")):
                shot = out / f"plan-{profile}-{scheme}-{name}.png"
                browse(page, f"--window-size={size}", f"--screenshot={shot}", anchor=f"#{scheme}")
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    print(f"screenshots are in {out}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
