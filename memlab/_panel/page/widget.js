/** The panel in a notebook: the front end of an anywidget. */

import { Kernel } from "./kernel.js";
import { Panel } from "./panel.js";
import { html, render as show } from "./vendor/preact.js";

/** @param {{model: import("./kernel.js").Model, el: HTMLElement}} given @returns {() => void} takes it away again */
function render({ model, el }) {
  const kernel = new Kernel(model, el);
  const root = document.createElement("div");
  el.append(root);
  show(html`<${Panel} source=${kernel} />`, root);
  return () => {
    kernel.close();
    show(null, root);
    root.remove();
  };
}

export default { render };
