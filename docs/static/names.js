// The theme's buttons that unfold a part of the table of contents have no name for a screen reader.
for (const button of document.querySelectorAll("summary:has(> .toctree-toggle)")) {
  const link = button.closest("li").querySelector(":scope > a");
  button.setAttribute("aria-label", `pages below ${link.textContent}`);
}
