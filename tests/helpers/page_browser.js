// As much of a browser as the page of a step needs: runs the page's own script and records what it
// draws. Usage: node page_browser.js PAGE.html EVENTS.json; EVENTS is a list of events of the canvas
// ({"type": "wheel", ...}) and of checkboxes ({"check": "dim"}). After each, what is drawn in the
// frame and the text of the tip are printed as one line of JSON.
"use strict";
const fs = require("fs");
const vm = require("vm");

const page = fs.readFileSync(process.argv[2], "utf8");
const events = JSON.parse(fs.readFileSync(process.argv[3], "utf8"));
const WIDTH = Number(process.argv[4] || 1400), HEIGHT = Number(process.argv[5] || 800);
const scripts = [...page.matchAll(/<script([^>]*)>([^]*?)<\/script>/g)];

let frame = [];
let clips = [[0, 0, WIDTH, HEIGHT]];
let rect = null, line = [];
const context = {
  globalAlpha: 1,
  setTransform() {},
  clearRect() { frame = []; },
  save() { clips.push(clips[clips.length - 1]); },
  restore() { clips.pop(); },
  beginPath() { rect = null; line = []; },
  rect(x, y, w, h) { rect = [x, y, w, h]; },
  clip() { clips[clips.length - 1] = rect; },
  measureText(text) { return { width: text.length * parseFloat(this.font.match(/([\d.]+)px/)[1]) * 0.62 }; },
  fillRect(x, y, w, h) { add("rect", { x, y, w, h, colour: this.fillStyle, alpha: this.globalAlpha }); },
  fillText(text, x, y) {
    add("text", { text, x, y, colour: this.fillStyle, font: this.font, align: this.textAlign });
  },
  moveTo(x, y) { line.push([[x, y]]); },
  lineTo(x, y) { line[line.length - 1].push([x, y]); },
  stroke() { add("line", { lines: line, colour: this.strokeStyle, width: this.lineWidth }); },
};
function add(what, values) {
  for (const value of Object.values(values)) {
    if (typeof value === "number" && !Number.isFinite(value)) throw new Error(`${what} with ${value}`);
  }
  frame.push({ what, clip: clips[clips.length - 1], ...values });
}

function element(id) {
  return {
    id, hidden: true, checked: id !== "dim", textContent: "", style: {}, handlers: {}, children: [],
    offsetWidth: 200, offsetHeight: 80,
    classList: { add() {}, remove() {} },
    getContext: () => context,
    setPointerCapture() {},
    addEventListener(type, handler) { this.handlers[type] = handler; },
    append(...found) { this.children.push(...found); },
    getBoundingClientRect: () => ({ left: 0, top: 0, width: WIDTH, height: HEIGHT }),
    get parentElement() { return element("view"); },
  };
}
const elements = {};
const document = {
  getElementById: (id) => (elements[id] = elements[id] || element(id)),
  createElement: element,
};
const asked = [];
const data = scripts.find((script) => script[1].includes("application/json"));
document.getElementById("data").textContent = data[2];
const window = { devicePixelRatio: 1, addEventListener() {} };
const sandbox = { document, window, requestAnimationFrame: (call) => asked.push(call) };
vm.createContext(sandbox);
vm.runInContext(scripts.find((script) => script[1] === "")[2], sandbox);

function report(event) {
  const began = process.hrtime.bigint();
  while (asked.length) asked.shift()();
  const drawn_ms = Number(process.hrtime.bigint() - began) / 1e6;
  const tip = elements.tip.hidden ? null : elements.tip.textContent;
  console.log(JSON.stringify({ event, frame, tip, drawn_ms, legend: legend() }));
}

function legend() {
  return elements.legend.children.map((entry) => entry.children[1]);
}

report(null);
for (const event of events) {
  if (event.check) {
    elements[event.check].checked = !elements[event.check].checked;
    elements[event.check].handlers.change();
  } else {
    elements.canvas.handlers[event.type]({ preventDefault() {}, deltaX: 0, deltaMode: 0, ...event });
  }
  report(event);
}
