/** The panel in a notebook: the front end of an anywidget. */

import { Kernel } from "./kernel.js";
import { Panel } from "./panel.js";
import { html, render as show } from "./vendor/preact.js";

/** @param {{model: import("./kernel.js").Model, el: HTMLElement}} given @returns {() => void} takes it away again */
function render({ model, el }) {
  const kernel = new Kernel(model, el);
  const root = document.createElement("div");
  el.append(root);
  const stopFollowing = followScheme(el, root);
  show(html`<${Panel} source=${kernel} />`, root);
  return () => {
    stopFollowing();
    kernel.close();
    show(null, root);
    root.remove();
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
