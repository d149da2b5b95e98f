"""A fine-tuning as a person meets it: its adapter and its base are chosen above the sliders."""

from tests.system.browser import lab_browser as lab_ui
from tests.system.browser.conftest import SHOTS
from tests.system.browser.panel_page import button, costs, open_panel, settle, wait_for


def test_an_adapter_and_a_base_are_chosen_and_a_wrong_pair_is_explained(page, lab):
    panel = open_panel(page, lab, "finetune.ipynb")
    settle(panel)
    wait_for(lambda: "parameters are trained" in panel.inner_text())
    wait_for(lambda: costs(panel).startswith("predicted for"))
    for width, dark in ((1600, False), (1600, True), (900, False)):
        page.set_viewport_size({"width": width, "height": 900})
        lab_ui.set_theme(page, dark)
        settle(panel)
        panel.screenshot(path=SHOTS / f"finetune-{width}-{'dark' if dark else 'light'}.png")

    held = panel.locator(".memlab-choices").bounding_box()
    panel.get_by_label("Base", exact=True).select_option(label="int8")
    panel.get_by_label("Adapter", exact=True).select_option(label="dora")
    wait_for(lambda: "loses the scales of base='int8'" in panel.inner_text())
    assert button(panel, "Keep this prediction").is_disabled()
    assert panel.locator(".memlab-choices").bounding_box() == held, "nothing has moved"
    panel.screenshot(path=SHOTS / "finetune-wrong.png")
    button(panel, "set them back").click()
    wait_for(lambda: button(panel, "Keep this prediction").is_enabled())

    panel.get_by_label("Adapter", exact=True).select_option(label="ia3")
    wait_for(lambda: panel.get_by_label("Rank", exact=True).is_disabled())
    button(panel, "code").click()
    wait_for(lambda: "adapter='ia3'" in panel.inner_text())
