"""The moving picture at the top of README.md: a panel goes from red to green on a card of 8 GB.

A notebook with one panel is opened in JupyterLab and Chromium, its sliders are moved as a person
moves them, and the panel is photographed after each move. Nothing in it is drawn by hand.

    python -m benchmarks.moving_picture docs/red_to_green.gif
"""

import io
import sys
import tempfile
from pathlib import Path

from PIL import Image

from benchmarks.panel_session import opened
from tests.system.browser import lab_browser as lab_ui
from tests.system.browser import panel_page as panel_ui

STEP = {
    "workload": "finetune('llama-1b', adapter='lora', base='bf16', tokens=1024)",
    "device": "rtx-4060", "limit": None, "batch": 16,
}  # fmt: skip
MOVES = (("Batch size", "ArrowLeft", 1), ("Accumulation", "ArrowRight", 2),
         ("Memory budget", "ArrowLeft", 4))  # fmt: skip
FRAME_MS, LAST_MS = 900, 4000
WIDTH, COLOURS = 900, 96


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
            panel = panel_ui.run_cells(page)
            panel_ui.settle(panel)
            frames.append(panel.screenshot())
            for label, key, times in MOVES:
                for _ in range(times):
                    panel_ui.slider(panel, label).press(key)
                    panel_ui.settle(panel)
                    lab_ui.wait_until_drawn(page)
                    frames.append(panel.screenshot())
        browser.close()
    images = [Image.open(io.BytesIO(frame)).convert("RGB") for frame in frames]
    height = max(round(image.height * WIDTH / image.width) for image in images)
    small = []
    for image in images:
        whole = Image.new("RGB", (WIDTH, height), "white")
        whole.paste(image.resize((WIDTH, round(image.height * WIDTH / image.width))))
        small.append(whole.quantize(COLOURS))
    times = [FRAME_MS] * (len(small) - 1) + [LAST_MS]
    small[0].save(file, save_all=True, append_images=small[1:], duration=times, loop=0)
    print(f"{file}: {len(small)} frames, {Path(file).stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
