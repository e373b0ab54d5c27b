// Draws every figure of the page, and again in another theme.
function draw(plot) {
  if (plot.closest("details:not([open])")) return; // Drawn when it is unfolded.
  paint(plot, plot.nextElementSibling.textContent);
}

const drawAll = () => document.querySelectorAll(".plot").forEach(draw);
drawAll();
document.querySelectorAll("details").forEach((fold) =>
  fold.addEventListener("toggle", () => fold.querySelectorAll(".plot").forEach(draw)));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
