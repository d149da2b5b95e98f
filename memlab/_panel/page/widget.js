/** The panel in a notebook: the front end of an anywidget. */

import { mount } from "./app.js";
import { Kernel } from "./kernel.js";
import { Panel } from "./panel.js";
import { html, render as show } from "./vendor/preact.js";

/** @param {{model: import("./kernel.js").Model, el: HTMLElement}} given @returns {Promise<() => void>} takes it away again */
async function render({ model, el }) {
  const root = document.createElement("div");
  el.append(root);
  const stopFollowing = followScheme(el, root);
  const saved = model.get("saved"); // only in what `ipywidgets.embed` writes
  const close = saved ? await mount(root, saved) : live(model, el, root);
  return () => {
    stopFollowing();
    close();
    root.remove();
  };
}

/** Shows the panel of a kernel. @param {import("./kernel.js").Model} model @param {HTMLElement} el of the widget @param {HTMLElement} root in it */
function live(model, el, root) {
  const kernel = new Kernel(model, el);
  const still = model.get("still");
  const hiding = document.createElement("style");
  hiding.textContent = `#${still}, .jp-OutputArea-child:has(#${still}) { display: none; }`;
  root.dataset.hides = still;
  el.append(hiding);
  show(html`<${Panel} source=${kernel} />`, root);
  return () => {
    kernel.close();
    show(null, root);
    hiding.remove();
  };
}

/**
 * Takes over a page's choice of light or dark where the style sheet cannot see it, as in marimo's
 * shadow roots; a page that has not chosen has the system's.
 *
 * @param {HTMLElement} el in the page
 * @param {HTMLElement} root of the panel
 */
function followScheme(el, root) {
  const take = () => {
    const chosen = getComputedStyle(el).colorScheme;
    if (chosen === "light" || chosen === "dark") root.style.setProperty("--ml-scheme", chosen);
    else root.style.removeProperty("--ml-scheme");
  };
  const observer = new MutationObserver(take);
  for (const element of [document.documentElement, document.body]) {
    observer.observe(element, { attributes: true });
  }
  take();
  return () => observer.disconnect();
}

export default { render };
