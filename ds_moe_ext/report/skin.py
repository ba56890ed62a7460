"""The style sheet and the script of the page. The page reads well without the script."""

CSS = """
:root{--page:#f6f6f3;--card:#fff;--ink:#1b1b19;--soft:#5d5d58;--rule:#e3e3dd;--grid:#ecece7;
--floor:#b9b9b1;--accent:#2a62b5;--chip:#efefea;color-scheme:light dark}
@media screen and (prefers-color-scheme:dark){:root{--page:#131312;--card:#1c1c1a;--ink:#ecece7;
--soft:#a3a39b;--rule:#33332f;--grid:#2a2a27;--floor:#66665f;--accent:#6ea2ea;--chip:#2a2a27}
.ramp{filter:invert(.9) hue-rotate(180deg)}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1280px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:28px;line-height:1.2;margin:0 0 4px;letter-spacing:-.01em}
h2{font-size:18px;margin:0 0 4px}
h3{font-size:14px;margin:18px 0 6px;overflow-wrap:anywhere}
h4{font-size:13px;margin:14px 0 2px;overflow-wrap:anywhere}
p{margin:0 0 10px;max-width:78ch}
code{font:.93em ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;
overflow-wrap:anywhere}
.facts,.note{color:var(--soft);font-size:13.5px}
.facts span:not(:last-child)::after{content:"·";margin:0 .5em}
.verdict{font-size:19px;line-height:1.45;margin:18px 0 8px;max-width:66ch}
.verdict b{white-space:nowrap}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:20px;
margin-top:18px}
.tiles{display:grid;grid-template-columns:repeat(var(--columns),1fr);gap:12px;
margin-top:20px}
.tiles>div{background:var(--card);border:1px solid var(--rule);border-radius:10px;
padding:12px 14px}
.tiles span{display:block;font-size:13px;color:var(--soft);overflow-wrap:anywhere}
.tiles b{display:block;font-size:25px;line-height:1.25;font-weight:600}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:6px 10px;border-bottom:1px solid var(--rule);white-space:nowrap}
th{font-weight:600;color:var(--soft);font-size:13px;white-space:normal;vertical-align:bottom}
th:nth-child(-n+2),td:nth-child(-n+2){text-align:left}
td:first-child{white-space:normal;min-width:180px}
th:first-child,td:first-child{padding-left:0}
th:last-child,td:last-child{padding-right:0}
figure{margin:0}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;margin:8px 0;max-width:none;
color:var(--soft)}
.legend span{overflow-wrap:anywhere}
.legend b{font-weight:500;color:var(--ink)}
.dash,.box{display:inline-block;vertical-align:middle;margin-right:6px}
.dash{width:16px;height:3px;border-radius:2px;background:var(--line)}
.mark{display:inline-block;height:12px;vertical-align:-1px;margin:0 8px 0 6px;
border-left:1px dashed var(--soft)}
.box{width:12px;height:12px;border-radius:3px}
.axes{display:grid;grid-template-columns:44px minmax(0,1fr);position:relative}
.axes>svg,.axes>img{grid-column:2;width:100%;display:block}
.plot{overflow:visible}
.plot line{stroke:var(--grid);stroke-width:1;shape-rendering:crispEdges}
.plot line.floor{stroke:var(--floor)}
.plot line.mark{stroke:var(--soft);stroke-dasharray:2 3}
.line{fill:none;stroke:var(--line);stroke-width:2;stroke-linejoin:round;
vector-effect:non-scaling-stroke}
.band{fill:var(--line);opacity:.16}
.marks,.cells{position:relative;font-size:12px;color:var(--soft)}
.marks span{position:absolute;right:8px;transform:translateY(-50%)}
.steps{grid-column:2;position:relative;height:20px;font-size:12px;color:var(--soft);
margin-top:3px;font-variant-numeric:tabular-nums}
.steps span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.steps span.first{transform:none}.steps span.last{transform:translateX(-100%)}
.multiples{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(270px,100%),1fr));
gap:6px 26px}
summary{cursor:pointer;margin:12px 0 4px;color:var(--accent)}
.heat .axes,.map .axes{grid-template-columns:112px minmax(0,1fr)}
.beside{display:flex;flex-wrap:wrap;gap:10px 28px;align-items:flex-start}
.beside .heat{flex:1 1 560px;min-width:0}.beside .map{flex:0 1 auto;min-width:0}
.map img{display:block;max-width:none}
.key{width:14px;height:14px;vertical-align:-2px;margin-right:6px}
.scales{display:flex;flex-wrap:wrap;gap:0 40px;align-items:flex-end}.scales>div{flex:1 1 380px}
.cells span{position:absolute;left:0;transform:translateY(-50%);white-space:nowrap}
.cells b{color:var(--ink);font-weight:500}
.cells i{position:absolute;right:8px;transform:translateY(-50%);font-style:normal;font-size:11px}
.ramp{image-rendering:pixelated;print-color-adjust:exact;-webkit-print-color-adjust:exact}
.scale{font-size:13px;color:var(--soft);max-width:460px;margin:8px 0 14px}
.scale>div{padding:0 14px}
.scale .ramp{width:100%;height:12px;display:block;margin-top:4px}
.bars-of{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(420px,100%),1fr));
gap:10px 44px}
.bars{display:grid;grid-template-columns:max-content minmax(60px,1fr) max-content max-content;
gap:7px 12px;align-items:center;font-size:14px;font-variant-numeric:tabular-nums}
.bars b{font-weight:500}
.bars span{text-align:right}
.bars span:last-child,.bars span:nth-child(4n){color:var(--soft)}
.bars svg{width:100%;display:block}
.terms td:nth-child(2){width:56%;min-width:120px}
.terms svg{width:100%;display:block}.terms rect{fill:var(--line)}
rect,.box{print-color-adjust:exact;-webkit-print-color-adjust:exact}
.time{grid-template-columns:112px minmax(0,1fr)}
.lanes{font-size:12px;color:var(--soft)}
.lanes span{display:block;height:26px;line-height:26px;white-space:nowrap;overflow:hidden;
text-overflow:ellipsis;padding-right:8px}
.lanes b{color:var(--ink);font-weight:500}
.task{stroke:var(--card);stroke-width:1}
.plot text{font-size:11.5px;fill:var(--ink);pointer-events:none}
.pass-box{fill:var(--chip);stroke:var(--rule)}
.pass{margin-top:12px}
.pass figcaption{font-size:13px;color:var(--soft);margin-bottom:4px}
.pass figcaption b{color:var(--ink)}
.pick{display:none;align-items:center;gap:8px;flex-wrap:wrap;font-size:14px;margin:6px 0}
.js .pick{display:flex}
@media screen{.js .pick~[data-panel]>h3{display:none}}
select{font:inherit;color:inherit;background:var(--chip);border:1px solid var(--rule);
border-radius:6px;padding:4px 8px;max-width:100%}
#tip{position:fixed;z-index:9;pointer-events:none;background:var(--ink);color:var(--page);
font-size:12.5px;line-height:1.4;padding:6px 9px;border-radius:6px;white-space:pre-line;
max-width:min(340px,90vw);overflow-wrap:anywhere}
.cross{stroke:var(--soft)!important}
@media(max-width:1080px){.tiles{grid-template-columns:repeat(3,1fr)}}
@media(max-width:640px){.tiles{grid-template-columns:repeat(2,1fr)}
td:first-child{min-width:104px}th,td{padding:6px 5px}
.lanes{font-size:11px}.pass-box+text{display:none}main{padding:18px 12px 40px}section{padding:14px}
.heat .axes,.map .axes,.axes.time{grid-template-columns:88px minmax(0,1fr)}
.cells i{display:none}.task+svg{display:none}.verdict{font-size:17px}}
@media print{body{background:#fff;font-size:12px}main{max-width:none;padding:0}
section,.tiles>div{break-inside:avoid;border-color:#ccc}.pick{display:none!important}
figure,tr{break-inside:avoid}.wide{overflow:visible}th,td{padding:4px 6px}table{font-size:11px}
td:first-child{min-width:0}.task+svg text,.pass-box+text{font-size:9px}}
"""

SCRIPT = """
(()=>{
const root=document.documentElement;root.classList.add('js');
const tip=document.createElement('div');tip.id='tip';tip.hidden=true;document.body.append(tip);
const show=(event,text)=>{tip.textContent=text;tip.hidden=false;
 const x=event.clientX,y=event.clientY,w=tip.offsetWidth,h=tip.offsetHeight;
 tip.style.left=Math.max(4,x+14+w>innerWidth?x-w-14:x+14)+'px';
 tip.style.top=Math.max(4,y+16+h>innerHeight?y-h-10:y+16)+'px'};
const steps=JSON.parse(document.getElementById('steps').textContent);
const at=(event,box,count)=>Math.max(0,Math.min(count-1,
 Math.floor((event.clientX-box.left)/box.width*count)));
document.querySelectorAll('.pick select').forEach(select=>{
 const panels=document.querySelectorAll('[data-panel='+select.name+']');
 const pick=()=>panels.forEach((panel,i)=>panel.hidden=i!==select.selectedIndex);
 select.addEventListener('change',pick);pick()});
document.querySelectorAll('.lines').forEach(figure=>{
 const values=JSON.parse(figure.dataset.values),plot=figure.querySelector('.plot');
 const names=[...figure.querySelectorAll('.legend b')].map(name=>name.textContent);
 const notes=JSON.parse(figure.dataset.notes);
 const cross=document.createElementNS('http://www.w3.org/2000/svg','line');
 cross.setAttribute('class','cross');cross.setAttribute('y1','0');cross.setAttribute('y2','100%');
 plot.addEventListener('mousemove',event=>{
  const count=steps.lines.length,i=at(event,plot.getBoundingClientRect(),count);
  const x=(i+.5)/count*100+'%';cross.setAttribute('x1',x);cross.setAttribute('x2',x);
  plot.append(cross);show(event,'step '+steps.lines[i]+'\\n'
   +names.map((name,k)=>name+'  '+values[k][i].toFixed(2)+'\\u00d7').join('\\n')
   +(notes[i]?'\\n'+notes[i]:''))});
 plot.addEventListener('mouseleave',()=>{cross.remove();tip.hidden=true})});
const pixels=image=>{const canvas=document.createElement('canvas');
 canvas.width=image.naturalWidth;canvas.height=image.naturalHeight;
 const pen=canvas.getContext('2d');pen.drawImage(image,0,0);
 return pen.getImageData(0,0,canvas.width,canvas.height)};
const colour=(data,i)=>data[4*i]<<16|data[4*i+1]<<8|data[4*i+2];
const scales={};
const scale=name=>scales[name]??=(()=>{const ramp=document.getElementById(name);
 const found=pixels(ramp),values=JSON.parse(ramp.dataset.values);
 return {unit:ramp.dataset.unit,value:new Map(values.map((v,i)=>[colour(found.data,i),v]))}})();
const held=figure=>{const shelves=JSON.parse(figure.dataset.held),high=+figure.dataset.row;
 return y=>{const shelf=shelves.findLast(one=>one[1]<=y);
  return shelf?[shelf[2+Math.floor((y-shelf[1])/high)],shelf[0]]:[]}};
addEventListener('beforeprint',()=>document.querySelectorAll('details')
 .forEach(one=>one.open=true));
document.querySelectorAll('.heat').forEach(figure=>{
 const image=figure.querySelector('img'),expertAt=held(figure);let found=null;
 image.addEventListener('mousemove',event=>{
  const {unit,value}=scale(figure.dataset.ramp);found=found||pixels(image);
  const box=image.getBoundingClientRect(),i=at(event,box,found.width);
  const y=Math.floor((event.clientY-box.top)/box.height*found.height);
  const [expert,home]=expertAt(y);
  if(expert===undefined){tip.hidden=true;return}
  const there=value.get(colour(found.data,y*found.width+i));
  show(event,'expert '+expert+', home cell '+home+'\\nstep '+steps.heat[i]+'\\nabout '
   +there.toFixed(2)+unit)});
 image.addEventListener('mouseleave',()=>tip.hidden=true)});
document.querySelectorAll('.map').forEach(figure=>{
 const image=figure.querySelector('img'),expertAt=held(figure);
 const copied=JSON.parse(figure.dataset.copied);
 image.addEventListener('mousemove',event=>{
  const box=image.getBoundingClientRect(),cell=at(event,box,figure.dataset.cells);
  const [expert,home]=expertAt(event.clientY-box.top);
  if(expert===undefined){tip.hidden=true;return}
  const cells=copied[expert],what=cell===home?'home':cells.includes(cell)?'copy':'no copy';
  show(event,'expert '+expert+', cell '+cell+': '+what+'\\nhome cell '+home
   +(cells.length?', copied to '+cells.join(', '):', not copied'))});
 image.addEventListener('mouseleave',()=>tip.hidden=true)});
document.addEventListener('mouseover',event=>{
 const title=event.target.querySelector&&event.target.querySelector(':scope>title');
 if(title){event.target.dataset.tip=title.textContent;title.remove()}
 if(event.target.dataset&&event.target.dataset.tip)show(event,event.target.dataset.tip)});
document.addEventListener('mouseout',event=>{
 if(event.target.dataset&&event.target.dataset.tip)tip.hidden=true});
})();
"""
