"""The moving picture at the top of README.md: a panel goes from red to green on a card of 8 GB.

A notebook with one panel is opened in JupyterLab and Chromium, its sliders are moved as a person
moves them, and the panel is photographed after each move. Nothing in it is drawn by hand.

    python -m benchmarks.moving_picture docs/red_to_green.gif
"""

import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from PIL import Image

from benchmarks.panel_session import opened
from tests.system.browser import lab_browser as lab_ui
from tests.system.browser import panel_page as panel_ui

STEP = {
    "workload": "finetune('llama-1b', adapter='lora', base='bf16', tokens=1024)",
    "device": "rtx-4060", "limit": None, "batch": 8,
}  # fmt: skip
MOVED, MOST_MOVES = ("Accumulation", "Memory budget"), 3  # of each, in turn
FITS, KINDS = "✔ fits", ("predicted", "interpolated")
FRAME_MS, LAST_MS = 1500, 5000
WIDTH, COLOURS = 900, 255


def photographs(page: Any) -> list[bytes]:
    """Move the sliders until the step fits; return the panel before and after each move."""
    panel = panel_ui.run_cells(page)
    panel_ui.settle(panel)
    frames = [panel.screenshot()]
    for label in MOVED:
        key = "ArrowRight" if label == MOVED[0] else "PageDown"
        for _ in range(MOST_MOVES):
            if panel_ui.badge(panel).startswith(FITS):
                return frames
            panel_ui.slider(panel, label).press(key)
            panel_ui.wait_for(lambda: panel_ui.badge(panel).endswith(KINDS))
            panel_ui.settle(panel)
            lab_ui.wait_until_drawn(page)
            frames.append(panel.screenshot())
    return frames


def main() -> None:
    """Write the picture to the file that is named."""
    from playwright.sync_api import sync_playwright

    (file,) = sys.argv[1:]
    frames = []
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=lab_ui.CHROMIUM, args=lab_ui.ARGUMENTS)
        folder = Path(place, "notebooks")
        folder.mkdir()
        for page in opened(browser, folder, Path(place, "cache"), **STEP):
            frames += photographs(page)
        browser.close()
    images = [Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames]
    height = max(round(image.height * WIDTH / image.width) for image in images)
    small = []
    for image in images:
        whole = Image.new("RGB", (WIDTH, height), "white")
        whole.paste(image.resize((WIDTH, round(image.height * WIDTH / image.width))))
        small.append(whole.quantize(COLOURS, Image.Quantize.MAXCOVERAGE))
    times = [FRAME_MS] * (len(small) - 1) + [LAST_MS]
    small[0].save(file, save_all=True, append_images=small[1:], duration=times, loop=0)
    print(f"{file}: {len(small)} frames, {Path(file).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
