"use strict";
// Show the title of a mark at once, and the plots of the level that is chosen.
const tip = document.createElement("div");
tip.id = "tip";
tip.hidden = true;
document.body.append(tip);

function titleOf(element) {
  const found = element.querySelector(":scope > title");
  if (found) {
    element.dataset.tip = found.textContent;
    element.setAttribute("aria-label", found.textContent);
    found.remove();
  }
  return element.dataset.tip;
}

document.addEventListener("pointermove", (event) => {
  const inside = event.target.closest(".plot svg");
  const text = inside && event.target !== inside && titleOf(event.target);
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const right = window.scrollX + document.documentElement.clientWidth - tip.offsetWidth - 8;
  tip.style.left = `${Math.max(4, Math.min(event.pageX + 14, right))}px`;
  tip.style.top = `${event.pageY + 16}px`;
});
document.addEventListener("pointerleave", () => { tip.hidden = true; });

function draw() {
  const chooser = document.getElementById("level");
  if (!chooser) return;
  for (const group of document.querySelectorAll("[data-level]")) {
    group.hidden = group.dataset.level !== chooser.value;
  }
}

const chooser = document.getElementById("level");
if (chooser) chooser.addEventListener("change", draw);
draw();
