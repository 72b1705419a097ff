// A click on a picture opens it in full: as wide as the window or as it was drawn, whichever is more, and with the
// names of its bars on hovering, which a browser shows in an <object> and not in an <img>.
document.addEventListener("click", (event) => {
  const image = event.target.closest(".md-typeset img");
  if (!image || image.closest("a")) return;
  const dialog = document.createElement("dialog");
  const picture = document.createElement("object");
  const close = document.createElement("button");
  picture.type = "image/svg+xml";
  picture.data = image.src;
  picture.width = Math.max(image.naturalWidth, document.documentElement.clientWidth);
  picture.setAttribute("aria-label", image.alt);
  close.textContent = "Close";
  close.addEventListener("click", () => dialog.close());
  dialog.className = "picture";
  dialog.addEventListener("close", () => dialog.remove());
  dialog.append(close, picture);
  document.body.append(dialog);
  dialog.showModal();
});
